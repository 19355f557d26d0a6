# SPDX-License-Identifier: Apache-2.0
"""The NeMo data module over a store: whole sequences in Megatron's order, numbered.

Sequences are cut from the concatenated documents by Megatron's `GPTDataset` (shuffled by document
and by sample, seeded). Whether attention crosses document borders within a sequence is a choice:
`across`, positions run on; `within`, positions restart at each document, and a sample says where
documents start, so that the model keeps them apart. Every sample carries its number, by which a
run asserts that a resume neither repeats nor skips one.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

from data.store import Manifest


class NumberedDataset(GPTDataset):
    """Megatron's GPT dataset whose samples say which they are."""

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return tokens, labels, loss_mask, position_ids [S] and the sample's number.

        Where positions restart, `document_starts` [S] is true at each first token.
        """
        sample = super().__getitem__(idx)
        sample["sample_id"] = torch.tensor(-1 if idx is None else idx)
        if self.config.reset_position_ids:
            sample["document_starts"] = sample["position_ids"] == 0
        return sample


class StoreDataModule(PreTrainingDataModule):
    """Train on the `train` split of a store and validate on the `heldout` one."""

    def __init__(
        self,
        store: str,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        documents: Literal["across", "within"] = "across",
        seed: int = 1234,
        num_workers: int = 2,
        pin_memory: bool = True,
    ) -> None:
        """Open the store; raises `data.store.StoreError` where it is missing or cut short.

        Batch sizes are in sequences. `documents` says whether attention goes across the documents
        of a sequence or stays within each.
        """
        if documents not in ("across", "within"):
            raise ValueError(f"documents is {documents!r}; attention goes 'across' or 'within'")
        manifest = Manifest.load(Path(store))
        train, heldout = (str(manifest.split_prefix(split)) for split in ("train", "heldout"))
        super().__init__(
            paths={"train": [train], "validation": [heldout], "test": [heldout]},
            split=None,
            tokenizer=AutoTokenizer(str(manifest.tokenizer_path)),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            seed=seed,
            num_workers=num_workers,
            pin_memory=pin_memory,
            reset_position_ids=documents == "within",
            index_mapping_dir=str(Path(store) / "index"),
            dataset_cls=NumberedDataset,
            output_log=False,
        )
        # NeMo builds an [S, S] mask where Transformer Engine is missing; ours needs none.
        self.create_attention_mask = False
        self.store = store
        self.manifest = manifest

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume continues from: the samples consumed and the store they are of."""
        return {**super().state_dict(), "tokenizer": self.manifest.tokenizer.fingerprint}
