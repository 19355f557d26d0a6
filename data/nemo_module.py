# SPDX-License-Identifier: Apache-2.0
"""The NeMo data module of a store: full sequences in Megatron's order or of a mix, numbered.

Sequences are cut from the concatenated documents by Megatron's `GPTDataset` (shuffled by document
and by sample, seeded). Attention within a sequence either crosses document borders (`across`,
consecutive positions) or does not (`within`: positions restart at each document, and a sample marks
where documents start, so that the model masks the others). Every sample carries its number, by
which a run asserts that a resume neither repeats nor skips one.

A stage with a mix (`data.mixture`) trains on packed rows of its sources instead; validation reads
the held-out documents as above.

Training samples may train a longer context than they have (`data.train_short`); validation uses the
plain text at consecutive positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

from data.mixture.config import Mix
from data.mixture.dataset import MixedDataset, squared
from data.mixture.groups import MixError
from data.mixture.stage_rows import SEED, StageRows, mix_of
from data.store import Manifest, StoreError
from data.token_files import cached_order
from data.token_files.stored_documents import StoredDocuments, require_whole
from data.train_short.samples import PositionsOf, ScaleOf, TrainShort
from data.train_short.sentences import SentenceSelection

T = TypeVar("T")

NO_TOKEN = -1
"""What fills a sample that ends with the data; no vocabulary has it."""
IN_MEMORY = ""
"""Folder with which Megatron builds orders of samples and blends in memory, on every rank.

It reads those of a folder with pickles allowed, and with None it takes the folder of the tokens.
"""


class NumberedDataset(GPTDataset):
    """Megatron's GPT dataset, with the number of each sample, and padding that is no token.

    Megatron-Core 0.15.3 fills with the tokenizer's padding token, and then takes every such token
    for padding. In many tokenizers it is the one that ends documents too: these ends would be
    read as token 0 and never be predicted. Nor must the mask of one sample reach others: Megatron
    keeps the mask of the first one, its padding included, for all that this process reads.
    """

    train_short: TrainShort | None = None
    """Changes to training samples; validation samples have none."""
    cached_loss_mask: torch.Tensor | None
    passed_over: tuple[tuple[int, int], ...] = ()
    """Windows of samples to skip: the first sample and the count of each."""
    window: int | None = None
    """Tokens that a token attends to in the model's local layers; None if it has none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what Megatron's dataset takes."""
        super().__init__(*args, **kwargs)
        self._pad_token_id = NO_TOKEN

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> StoredDocuments:
        """Open the documents of a prefix, whose tokens may be in several files."""
        return StoredDocuments(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    def _build_document_sample_shuffle_indices(self) -> Any:
        """Return the order of samples, from the store if it is there and undamaged.

        Megatron builds it in memory and reads no file of it. The first rank writes what it has
        built before the others read.
        """
        return cached_order.read_or_build(
            self.config.order_folder,
            f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}",
            self.unique_description,
            super()._build_document_sample_shuffle_indices,
            writes=not dist.is_initialized() or dist.get_rank() == 0,
        )

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return tokens, labels, loss_mask, position_ids [S] and the sample's number.

        If positions restart, `document_starts` [S] is true at each first token; if the rotation has
        a random scale, `rope_scale` is the scale. The number does not depend on skipped windows.
        `row_facts` [3], or [4] with a window, are for the step log
        (`custom_modules.metrics.tally`).
        """
        sample = super().__getitem__(None if idx is None else self.place_of(idx))
        if self.cached_loss_mask is not None:
            self.cached_loss_mask = torch.ones_like(sample["loss_mask"])
        if self.train_short is not None and idx is not None:
            sample = self.train_short(sample, idx)
        sample["sample_id"] = torch.tensor(-1 if idx is None else idx)
        if self.config.reset_position_ids:
            sample["document_starts"] = sample["position_ids"] == 0
        sample["row_facts"] = self._row_facts(sample)
        return sample

    def _row_facts(self, sample: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return documents, the sum of squares of what tokens attend within, and no padding."""
        tokens = sample["tokens"]
        length = tokens.numel()
        if "document_starts" in sample:
            begins = sample["document_starts"].nonzero().flatten()
            ends = torch.cat([begins[1:], begins.new_tensor([length])])
            documents, lengths = begins.numel(), ends - begins
        else:
            inside = tokens[:-1] == self.config.tokenizer.eod  # a document begins after each
            documents, lengths = int(inside.sum()) + 1, torch.tensor([length])
        in_window = [] if self.window is None else [squared(lengths, self.window)]
        return torch.tensor([documents, squared(lengths), 0, *in_window])

    def place_of(self, number: int) -> int:
        """Return the index in the data of the sample with a number.

        A window is in the numbers of the run that found it, so earlier windows shift later ones.
        The data repeats from its start when it ends.
        """
        over = sum(count for first, count in self.passed_over if number >= first)
        return (number + over) % len(self)

    def documents_of(self, number: int) -> tuple[int, list[int]]:
        """Return the part of the split, of which there is one, and a sample's documents in it."""
        sample = self.shuffle_index[self.place_of(number)]
        first, last = (int(self.sample_index[at][0]) for at in (sample, sample + 1))
        return 0, [int(one) for one in self.document_index[first : last + 1]]


class StoreDataModule(PreTrainingDataModule):
    """Train on the `train` split of a store and validate on the `heldout` one."""

    _train_ds: Any
    _validation_ds: Any
    _test_ds: Any
    build_kwargs: dict[str, Any]
    seq_length: int

    def __init__(
        self,
        store: str,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        documents: Literal["across", "within"] = "across",
        seed: int = SEED,
        num_workers: int = 2,
        pin_memory: bool = True,
        positions: PositionsOf | None = None,
        rope_scale: ScaleOf | None = None,
        sentences: SentenceSelection | None = None,
        mix: Mix | None = None,
        recovers: Optional[int] = None,  # noqa: UP045  (nemo-run cannot parse X | None)
        window: Optional[int] = None,  # noqa: UP045
    ) -> None:
        """Open the store; raises `data.store.StoreError` where it is missing or cut short.

        Batch sizes are in sequences. `documents` says whether attention goes across the documents
        of a sequence or stays within each. For training samples only, `positions` draws the
        positions, `rope_scale` the scale of the rotation, and `sentences` chooses the text; `mix`
        chooses documents and packs them. `recovers` is the context length that a recovery stage
        keeps; only what describes the stage reads it. `window` is that of the model's local layers,
        for the step log.
        """
        if documents not in ("across", "within"):
            raise ValueError(f"documents is {documents!r}; attention goes 'across' or 'within'")
        if documents == "within" and (positions is not None or sentences is not None):
            raise ValueError(
                "documents is 'within', where positions restart at each document; skipped "
                "positions need 'across'"
            )
        drawn = any(one is not None for one in (positions, rope_scale, sentences))
        if mix is not None and drawn:
            raise ValueError(
                "the stage has a mix and draws positions, the rotation's scale or sentences, which "
                "take whole sequences of the store; leave one of the two out"
            )
        if mix is not None and mix.other_lengths and documents != "within":
            raise ValueError(
                "documents is 'across', and the mix has steps of other lengths, whose sequences "
                "share a row; they need documents 'within'"
            )
        manifest = Manifest.load(Path(store))
        train = list(map(str, manifest.prefixes("train")))
        if len(train) > 1 and drawn:
            raise ValueError(
                f"the store {store} has {len(train)} sources and the stage draws positions, the "
                "rotation's scale or sentences, which take a store of one source"
            )
        mix = None if drawn else mix_of(mix, manifest)
        heldout = _validation(manifest, seq_length)
        super().__init__(
            paths={"train": train, "validation": heldout, "test": heldout},
            split=None,
            tokenizer=AutoTokenizer(str(manifest.tokenizer_path)),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            seed=seed,
            num_workers=num_workers,
            pin_memory=pin_memory,
            reset_position_ids=documents == "within",
            index_mapping_dir=IN_MEMORY,
            dataset_cls=NumberedDataset,
            output_log=False,
        )
        # NeMo builds an [S, S] mask without Transformer Engine; the attention here needs none.
        self.create_attention_mask = False
        self.store = store
        self.manifest = manifest
        self.mix = mix
        self.documents = documents
        self.recovers = recovers
        self.window = window
        self.sentences = sentences
        self.train_short: TrainShort | None = None
        if positions is not None or rope_scale is not None or sentences is not None:
            self.train_short = TrainShort.of(
                manifest,
                self.tokenizer.tokenizer,
                seq_length=seq_length,
                seed=seed,
                positions=positions,
                rope_scale=rope_scale,
                selection=sentences,
            )

    @property
    def gpt_dataset_config(self) -> Any:
        """NeMo's configuration of the datasets, with the folder of their orders of samples."""
        config = super().gpt_dataset_config
        config.order_folder = Path(self.store) / "index"
        return config

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Build the datasets; training sentences are chosen from longer texts."""
        cached_order.leave_out_warnings()
        if self.mix is not None:
            _, *others = self.build_kwargs["blend_per_split"]
            with self._building([None, *others], self.seq_length):
                super().build(*args, **kwargs)
            self._train_ds = self._mixed(self.mix, kwargs.get("trainer_max_steps") or args[0])
        elif self.sentences is None:
            super().build(*args, **kwargs)
        else:
            train, *others = self.build_kwargs["blend_per_split"]
            with self._building([train, None, None], self.sentences.source_length):
                super().build(*args, **kwargs)
            built = self._train_ds
            with self._building([None, *others], self.seq_length):
                super().build(*args, **kwargs)
            self._train_ds = built
        for built in (self._train_ds, self._validation_ds, self._test_ds):
            for one in getattr(built, "datasets", [built]):  # of a blend, its parts
                if one is not None:  # facts of all rows are added up: they have one form
                    one.window = self.window
        if self.train_short is None:
            return
        assert isinstance(self._train_ds, NumberedDataset)  # of one split, never a blend
        self._train_ds.train_short = self.train_short

    def _mixed(self, mix: Mix, steps: int) -> MixedDataset:
        """Return the training samples of a mix; rank 0 packs them, the others wait."""
        files = []
        for prefix in self.manifest.prefixes("train"):
            require_whole(prefix)
            files.append(StoredDocuments(str(prefix)))
        rows = on_first_rank(
            lambda: StageRows.of(
                self.manifest,
                mix,
                seq_length=self.seq_length,
                steps=steps,
                rows=self.global_batch_size,
                seed=self.seed,
                document_lengths=[file.sequence_lengths for file in files],
            )
        )
        return MixedDataset(
            rows,
            files,
            within=self.documents == "within",
            data_ranks=parallel_state.get_data_parallel_world_size(),
            micro_batch=self.micro_batch_size,
            context=(
                parallel_state.get_context_parallel_rank(),
                parallel_state.get_context_parallel_world_size(),
            ),
            eod_id=self.manifest.tokenizer.eod_id,
            separator_id=self._separator(mix),
        )

    def _separator(self, mix: Mix) -> int | None:
        """Return the token that ends documents in place of the store's; MixError if unknown."""
        if not mix.separator:
            return None
        found = self.tokenizer.tokenizer.convert_tokens_to_ids(mix.separator)
        unknown = self.tokenizer.tokenizer.unk_token_id
        if found is None or (
            found == unknown and mix.separator != self.tokenizer.tokenizer.unk_token
        ):
            raise MixError(
                f"separator {mix.separator!r} is not a token of the store's tokenizer "
                f"{self.manifest.tokenizer.name}; name one of its special tokens"
            )
        return int(found)

    def step_facts(self, step: int) -> dict[str, Any]:
        """Return what the log says of a step's data; steps count from 0."""
        return self._train_ds.facts(step) if isinstance(self._train_ds, MixedDataset) else {}

    @contextmanager
    def _building(self, blends: list[Any], length: int) -> Iterator[None]:
        """Make NeMo build the splits that have a blend, with sequences of `length`."""
        before = self.build_kwargs, self.seq_length
        self.build_kwargs = {**self.build_kwargs, "blend_per_split": blends}
        self.seq_length = length
        try:
            yield
        finally:
            self.build_kwargs, self.seq_length = before

    def pass_over(self, windows: tuple[tuple[int, int], ...]) -> None:
        """Skip windows of training samples: the first sample and the count of each."""
        assert isinstance(self._train_ds, NumberedDataset | MixedDataset)
        self._train_ds.passed_over = windows

    def documents_of(self, number: int) -> list[dict[str, Any]]:
        """Return the documents that a training sample is made of: source, and number in it."""
        part, documents = self._train_ds.documents_of(number)
        source = self.manifest.train.parts[part].source
        return [
            {"sample": number, "source": source, "document": document} for document in documents
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: the samples consumed and the store's fingerprint."""
        return {**super().state_dict(), "tokenizer": self.manifest.tokenizer.fingerprint}


def _validation(manifest: Manifest, seq_length: int) -> list[str]:
    """Return the held-out files as Megatron takes them, by their tokens if there are several.

    A source that has not a whole sequence held out is not validated on: Megatron refuses it.
    Raises StoreError if no source has one.
    """
    parts = [part for part in manifest.heldout.parts if part.tokens > seq_length]
    if not parts and len(manifest.heldout.parts) > 1:
        raise StoreError(
            f"no source of the store {manifest.root} has more than {seq_length:,} held-out tokens; "
            "prepare it with a larger --heldout-fraction"
        )
    parts = parts or list(manifest.heldout.parts)
    if len(parts) == 1:
        return [str(manifest.root / parts[0].prefix)]
    return [word for part in parts for word in (str(part.tokens), str(manifest.root / part.prefix))]


def on_first_rank(work: Callable[[], T]) -> T:
    """Do work on rank 0 first, then on the others, which find what it has written.

    Raises on every rank what rank 0 raises, as RuntimeError on the others.
    """
    if not dist.is_initialized():
        return work()
    failed: list[str | None] = [None]
    done: T | None = None
    if dist.get_rank() == 0:
        try:
            done = work()
        except Exception as error:
            dist.broadcast_object_list([f"{type(error).__name__}: {error}"])
            raise
    dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise RuntimeError(f"rank 0 has failed: {failed[0]}")
    return work() if done is None else done
