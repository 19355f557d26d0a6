# SPDX-License-Identifier: Apache-2.0
"""The weighted mean of checkpoints of one model, as a checkpoint.

    out = (first + ... + last) / k                    summed in fp64, in the dtype of `first`
    out = (1 - share) * first + share * second        of two

LongRecipe (arXiv 2409.00509, eq. 7) averages the model before any extension and the one after its
annealing, half each, to restore its quality at short context. All are in Megatron's `torch_dist`
format and may have been written under different layouts: a tensor is identified by its name and
its place in the whole. One chunk at a time is read from each and written, so memory is that of the
largest chunk, one layer. Optimizers and rows that pad the vocabulary are left out.

The result has the form of the last: a stage folder, which another stage can start from and which
can be evaluated and exported; or an import, if that is one.

    OUT/config.yaml, stage.json          the last's recipe, which names its start, and facts
    OUT/checkpoints/step=N/              weights and marker, N the last's step

    OUT/                                 weights, marker and hugging_face/ of an import
"""

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
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData
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


def average(checkpoints: Sequence[Path], out: Path, *, share: float | None = None) -> None:
    """Write the mean of complete checkpoints as a new stage or import.

    `share` is the weight of the second of two; None: all have the same weight. The mean gets
    recipe, length, rotation and tokenizer of the last, which is in the folder of its stage or an
    import. `out` is written atomically. Raises ValueError for incomplete checkpoints, for different
    models or tokenizers, for a last one without its stage's recipe, if `out` exists, and if a file
    of a checkpoint is damaged.
    """
    if len(checkpoints) < 2:
        raise ValueError(f"a mean is of at least 2 checkpoints, not of {len(checkpoints)}")
    first, last = checkpoints[0], checkpoints[-1]
    weights, start = [1.0] * len(checkpoints), f"the mean of {', '.join(map(str, checkpoints))}"
    if share is not None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}; the share of the second checkpoint must be 0 to 1")
        weights, start = [1 - share, share], f"{1 - share:g} of {first} and {share:g} of {last}"
    if out.exists():
        raise ValueError(f"{out} exists already; write the mean into a new folder")
    require_folder(out, "the mean's folder")
    facts = [_complete(folder) for folder in checkpoints]
    for folder, of_folder in zip(checkpoints, facts, strict=True):
        if differing_tokenizer(of_folder, facts[0]):
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
        with ExitStack() as reading:
            for folder in checkpoints:
                reading.enter_context(verified(folder))
            sources = [
                _Source(folder / "weights", of_folder.get(VOCABULARY))
                for folder, of_folder in zip(checkpoints, facts, strict=True)
            ]
            for folder, source in zip(checkpoints, sources, strict=True):
                _require_same(sources[0], source, names=(first, folder))
            _write_mean(checkpoint / "weights", sources, weights)
        if imported:
            require_undamaged(last, HUGGING_FACE)
            shutil.copytree(last / HUGGING_FACE, part / HUGGING_FACE)
        else:
            _describe(stage, part, out.name, start)
        marker = {**facts[-1], "max_steps": step, FILES: for_marker(described(checkpoint))}
        write_marker(checkpoint, marker)
        os.replace(part, out)


def _complete(folder: Path) -> dict[str, Any]:
    """Return the marker of a complete checkpoint; raise ValueError for any other folder."""
    facts = checkpoint_facts(folder)
    if facts is None:
        raise ValueError(f"{folder} is not a complete checkpoint; name a folder with {MARKER}")
    return facts


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
        plan = LoadPlan(create_read_items_for_chunk_list(name, entry, [chunk]))
        self.reader.read_data(self.reader.prepare_local_plan(plan), _IntoOne(part)).wait()
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


class _IntoOne(DefaultLoadPlanner):
    """Read every item into its place in one tensor."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self._part = part

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor."""
        return self._part


def _write_mean(folder: Path, sources: Sequence[_Source], weights: Sequence[float]) -> None:
    """Write the weighted mean of all sources, in the chunks of the first."""

    def mean(name: str, chunk: ChunkStorageMetadata) -> Tensor:
        first = sources[0].chunk(name, chunk)
        result, total = first.double(), weights[0]
        for source, weight in zip(sources[1:], weights[1:], strict=True):
            total += weight
            result = torch.lerp(result, source.chunk(name, chunk).double(), weight / total)
        return result.to(first.dtype)

    chunks = (
        (name, TensorWriteData(chunk=chunk, properties=entry.properties, size=entry.size))
        for name, entry in sources[0].tensors.items()
        for chunk in entry.chunks
    )
    write_weights(folder, chunks, sources[0].states, mean)


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
