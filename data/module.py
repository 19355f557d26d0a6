# SPDX-License-Identifier: Apache-2.0
"""The NeMo data module over a store: whole sequences in Megatron's order, numbered.

Sequences are cut from the concatenated documents by Megatron's `GPTDataset` (shuffled by document
and by sample, seeded), so attention crosses document borders within a sequence. Every sample
carries its number, by which a run asserts that a resume neither repeats nor skips one.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

from data.store import Manifest


class NumberedDataset(GPTDataset):
    """Megatron's GPT dataset whose samples say which they are."""

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return tokens, labels, loss_mask, position_ids [S] and the sample's number."""
        sample = super().__getitem__(idx)
        return {**sample, "sample_id": torch.tensor(-1 if idx is None else idx)}


class StoreDataModule(PreTrainingDataModule):
    """Train on the `train` split of a store and validate on the `heldout` one."""

    def __init__(
        self,
        store: str,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        seed: int = 1234,
        num_workers: int = 2,
        pin_memory: bool = True,
    ) -> None:
        """Open the store; raises `data.store.StoreError` where it is missing or cut short.

        Batch sizes are in sequences.
        """
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
