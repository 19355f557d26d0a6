# SPDX-License-Identifier: Apache-2.0
"""The weighted mean of checkpoints of one model, as a checkpoint.

    out = (1 - share) * first + share * second        summed in fp64, in the dtype of `first`
    out = (first + ... + last) / k                    `average`, of k checkpoints

LongRecipe (arXiv 2409.00509, eq. 7) averages the model before any extension and the one after its
annealing, half each, to restore its quality at short context. All are in Megatron's `torch_dist`
format and may have been written under different layouts: a tensor is identified by its name and
its place in the whole. One chunk at a time is read from each and written, so memory is that of the
largest chunk, one layer. Optimizers and rows that pad the vocabulary are left out.

The result has the form of the second, or last: a stage folder, which another stage can start from
and which can be evaluated and exported; or an import, if that is one.

    OUT/config.yaml, stage.json          the second's recipe, which names its start, and facts
    OUT/checkpoints/step=N/              weights and marker, N the second's step

    OUT/                                 weights, marker and hugging_face/ of a second import
"""

import io
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from data.files.whole import folder_beside
from data.files.writable import require_folder
from data.store import differing_tokenizer
from recipes.checkpoints.files import (
    FILES,
    HUGGING_FACE,
    described,
    for_marker,
    require_undamaged,
    require_whole,
)
from recipes.checkpoints.marker import (
    MARKER,
    RECIPE,
    VOCABULARY,
    checkpoint_facts,
    write_marker,
)
from recipes.checkpoints.streamed_weights import write_weights
from recipes.checkpoints.verified import verified

WEIGHTS = "module."
"""Prefix of the names of a model's tensors in a checkpoint of NeMo."""
OF_VOCABULARY = {f"{WEIGHTS}{name}" for name in (
    "embedding.word_embeddings.weight", "output_layer.weight",
)}  # fmt: skip
"""Names of the weights with a row for each token."""
STAGE = "stage.json"
"""Record of a stage that a run's report reads (`eval.run_folder.StageRecord`)."""


def merge(first: Path, second: Path, out: Path, *, share: float = 0.5) -> None:
    """Write the mean of two complete checkpoints as a new stage or import.

    `share` is the weight of the second, a checkpoint in the folder of its stage or an import, whose
    recipe, length, rotation and tokenizer the mean gets. `out` is written atomically. Raises
    ValueError for a share outside 0 to 1, for incomplete checkpoints, for different models or
    tokenizers, for a second without its stage's recipe, if `out` exists, and if a file of the two
    is damaged.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; the share of the second checkpoint must be 0 to 1")
    said = f"{1 - share:g} of {first} and {share:g} of {second}"
    _write_mean((first, second), (1 - share, share), out, said)


def average(checkpoints: Sequence[Path], out: Path) -> None:
    """Write the mean of several checkpoints, in the form of the last, as `merge` does."""
    if len(checkpoints) < 2:
        raise ValueError(f"a mean is of at least 2 checkpoints, not of {len(checkpoints)}")
    said = f"the mean of {', '.join(map(str, checkpoints))}"
    _write_mean(checkpoints, [1.0] * len(checkpoints), out, said)


def _write_mean(
    checkpoints: Sequence[Path], weights: Sequence[float], out: Path, said: str
) -> None:
    if out.exists():
        raise ValueError(f"{out} exists already; merge into a new folder")
    require_folder(out, "the mean's folder")
    facts = [_complete(folder) for folder in checkpoints]
    first, last = checkpoints[0], checkpoints[-1]
    for folder, found in zip(checkpoints, facts, strict=True):
        if differing_tokenizer(found, facts[0]):
            raise ValueError(f"{first} and {folder} were trained with different tokenizers")
    imported, stage = (last / HUGGING_FACE).is_dir(), last.absolute().parent.parent
    if not imported and not (stage / RECIPE).is_file():
        raise ValueError(
            f"{last} has neither {HUGGING_FACE}/ nor its stage's {stage / RECIPE}, without which "
            "the mean could be neither evaluated nor exported; name the checkpoint where it was "
            "written, STAGE/checkpoints/step=N, or an import"
        )
    for folder in checkpoints:
        require_whole(folder)
    step = int(facts[-1]["step"])
    with folder_beside(out) as part:
        checkpoint = part if imported else part / "checkpoints" / f"step={step}"
        with ExitStack() as read:
            for folder in checkpoints:
                read.enter_context(verified(folder))
            sources = [
                _Source(folder / "weights", found.get(VOCABULARY))
                for folder, found in zip(checkpoints, facts, strict=True)
            ]
            for folder, source in zip(checkpoints, sources, strict=True):
                _require_same(sources[0], source, names=(first, folder))
            write_weights(checkpoint / "weights", _Mean(sources, weights))
        if imported:
            require_undamaged(last, HUGGING_FACE)
            shutil.copytree(last / HUGGING_FACE, part / HUGGING_FACE)
        else:
            _describe(stage, part, out.name, said)
        marker = {**facts[-1], "max_steps": step, FILES: for_marker(described(checkpoint))}
        write_marker(checkpoint, marker)
        os.replace(part, out)


def _complete(folder: Path) -> dict[str, Any]:
    """Return the marker of a complete checkpoint; raise ValueError for any other folder."""
    found = checkpoint_facts(folder)
    if found is None:
        raise ValueError(f"{folder} is not a complete checkpoint; name a folder with {MARKER}")
    return found


def _describe(stage: Path, to: Path, name: str, start: str) -> None:
    """Write a stage's recipe and facts into another folder, with the new name in the facts."""
    shutil.copy(stage / RECIPE, to)
    if (stage / STAGE).is_file():
        record = json.loads((stage / STAGE).read_text())
        (to / STAGE).write_text(json.dumps({**record, "name": name, "start": start}, indent=1))


class _Source:
    """The model's tensors in one checkpoint, readable by chunk."""

    def __init__(self, weights: Path, vocabulary: int | None = None) -> None:
        """Take the number of tokens; rows of embedding and LM head beyond it are left out."""
        self.reader = FileSystemReader(weights)
        metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata
        of_model = {name: entry for name, entry in entries.items() if name.startswith(WEIGHTS)}
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: _unpadded(entry, vocabulary) if name in OF_VOCABULARY else entry
            for name, entry in of_model.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.states = [
            name for name, entry in of_model.items() if isinstance(entry, BytesStorageMetadata)
        ]

    def chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Return a chunk of a tensor, which the files may store in other chunks."""
        entry = self.tensors[name]
        part = torch.empty(chunk.sizes, dtype=entry.properties.dtype)
        planner = _OneChunk(part, create_read_items_for_chunk_list(name, entry, [chunk]))
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        self.reader.read_data(plan, planner).wait()
        return part


def _unpadded(entry: TensorStorageMetadata, tokens: int | None) -> TensorStorageMetadata:
    """Return a weight with a row for each token alone; None: all of its rows are tokens."""
    rows = entry.size[0]
    if tokens is None or tokens >= rows:
        return entry
    chunks = [
        ChunkStorageMetadata(
            chunk.offsets,
            torch.Size((min(chunk.sizes[0], tokens - chunk.offsets[0]), *chunk.sizes[1:])),
        )
        for chunk in entry.chunks
        if chunk.offsets[0] < tokens
    ]
    return replace(entry, size=torch.Size((tokens, *entry.size[1:])), chunks=chunks)


class _OneChunk(LoadPlanner):
    """Read into one tensor."""

    def __init__(self, part: Tensor, items: list[ReadItem]) -> None:
        self._part = part
        self._items = items

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the items are given."""

    def create_local_plan(self) -> LoadPlan:
        """Return the items to read."""
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: one process reads."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise an error for anything but a tensor; none is requested."""
        raise NotImplementedError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the destination of an item."""
        place = self._part
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            place = place.narrow(dim, start, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor was read in place."""


class _Mean(SavePlanner):
    """Plan the chunks of the first checkpoint, and compute each when it is written."""

    def __init__(self, sources: Sequence[_Source], weights: Sequence[float]) -> None:
        self._first = sources[0]
        self._sources = sources
        self._weights = weights

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """Return the chunks of each tensor, and an empty state for each module that needs one."""
        items = [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=entry.properties, size=entry.size
                ),
            )
            for name, entry in self._first.tensors.items()
            for chunk in entry.chunks
        ]
        states = [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
            for name in self._first.states
        ]
        return SavePlan(items + states)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans and the metadata of the checkpoint."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the mean of a chunk; the state of modules is empty, as before a first step."""
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)  # a list of one, as Megatron saves its sharded objects
            return empty
        assert write_item.tensor_data is not None
        name, chunk = write_item.index.fqn, write_item.tensor_data.chunk
        first = self._first.chunk(name, chunk)
        mean, total = first.double(), self._weights[0]
        for source, weight in zip(self._sources[1:], self._weights[1:], strict=True):
            total += weight
            mean = torch.lerp(mean, source.chunk(name, chunk).double(), weight / total)
        return mean.to(first.dtype)


def _require_same(first: _Source, second: _Source, *, names: tuple[Path, Path]) -> None:
    """Raise ValueError unless both have tensors of the same names and sizes."""
    shapes = [{name: tuple(e.size) for name, e in s.tensors.items()} for s in (first, second)]
    if not shapes[0]:
        raise ValueError(f"{names[0]} has no tensor of a model: no name begins with {WEIGHTS}")
    different = sorted(
        name
        for name in shapes[0].keys() | shapes[1].keys()
        if shapes[0].get(name) != shapes[1].get(name)
    )
    if different:
        name = different[0]
        raise ValueError(
            f"{names[0]} and {names[1]} are not of one model: {name} is "
            f"{shapes[0].get(name, 'missing')} in one and {shapes[1].get(name, 'missing')} in the "
            f"other, and {len(different) - 1} more differ"
        )
