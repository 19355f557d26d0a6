# SPDX-License-Identifier: Apache-2.0
"""One process writes a checkpoint into several files, with what a single file would hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData
from torch.distributed.checkpoint.state_dict_saver import save

from recipes.checkpoints.streamed_weights import write_weights


def write(folder: Path, state: dict[str, Any]) -> None:
    """Write a state, each of its tensors as one chunk."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    chunks = [
        (name, TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size((0,)), value.size()),
            properties=TensorProperties.create_from_tensor(value), size=value.size(),
        ))
        for name, value in tensors.items()
    ]  # fmt: skip
    write_weights(folder, chunks, state.keys() - tensors, lambda name, _: tensors[name])


def layers(count: int) -> dict[str, Any]:
    """Return weights of layers, some of them large, and a state of a module."""
    sizes = [3_000 if at % 3 else 9_000 for at in range(count)]
    weights = {f"module.{at:03}": torch.randn(size) for at, size in enumerate(sizes)}
    return {**weights, "module.state": ["a module's"]}


def files(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob("*.distcp"))]


def test_many_tensors_are_in_eight_files_of_about_as_many_bytes(tmp_path):
    state = layers(64)
    write(tmp_path / "weights", state)
    sizes = files(tmp_path / "weights")
    assert len(sizes) == 8
    assert max(sizes) < 1.5 * min(sizes)
    whole = tmp_path / "whole"
    whole.mkdir()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=FileSystemWriter(whole), planner=planner, no_dist=True)
    assert len(files(whole)) == 1
    read = [FileSystemReader(folder).read_metadata() for folder in (tmp_path / "weights", whole)]
    assert read[0].state_dict_metadata == read[1].state_dict_metadata
    assert read[0].storage_data.keys() == read[1].storage_data.keys()


@pytest.mark.parametrize(("tensors", "expected"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_no_file_is_empty(tmp_path, tensors, expected):
    state = {f"module.{at}": torch.randn(1_000) for at in range(tensors)} or {"module.s": [1]}
    write(tmp_path / "weights", state)
    sizes = files(tmp_path / "weights")
    assert len(sizes) == expected
    assert min(sizes) > 0


def test_megatron_reads_every_bit_of_them(tmp_path, megatron_rank):
    state = layers(20)
    write(tmp_path / "weights", state)
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    wanted = {
        name: ShardedTensor.from_rank_offsets(name, torch.empty_like(value))
        for name, value in weights.items()
    }
    found = dist_checkpointing.load(wanted, str(tmp_path / "weights"))
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
