# SPDX-License-Identifier: Apache-2.0
"""Write a Megatron checkpoint from one process, one tensor at a time, into several files.

`torch.distributed.checkpoint`, whose format `torch_dist` uses, writes one data file per thread,
and each file is hashed by one thread, later by one rank. Several of its threads would each hold a
tensor in memory. Here the plan is split instead, in order, into parts of about equal bytes, which
are written in turn. A tensor is read, or computed, when it is written.
"""

import io
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

DATA_FILES = 8
"""Number of hashing threads; fewer files for fewer tensors."""
Read = Callable[[str, ChunkStorageMetadata], Tensor]
"""Returns a chunk of a named tensor."""


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, TensorWriteData]], states: Iterable[str], read: Read
) -> None:
    """Write chunks of named tensors, and an empty state of each module, into a new folder."""
    folder.mkdir(parents=True)
    items = [
        WriteItem(MetadataIndex(name, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        for name, data in tensors
    ]
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in states]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a single process
        writer, planner = _SeveralFiles(folder), _Streamed(items, read)
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    torch.save({"content_metadata": {"singleton_local_shards": False}}, folder / "common.pt")
    config = CheckpointingConfig("torch_dist", 1, common_backend="torch", common_backend_version=1)
    save_config(config, str(folder))


class _Streamed(DefaultSavePlanner):
    """Plan the given items instead of a state dict."""

    def __init__(self, items: list[WriteItem], read: Read) -> None:
        super().__init__(flatten_state_dict=False)
        self._items = items
        self._read = read

    def create_local_plan(self) -> SavePlan:
        """Return the items."""
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return a chunk, or the bytes of a state as before a first step."""
        if write_item.tensor_data is not None:
            return self._read(write_item.index.fqn, write_item.tensor_data.chunk)
        empty = io.BytesIO()
        torch.save([None], empty)  # a list of one, as Megatron saves its sharded objects
        return empty


class _SeveralFiles(FileSystemWriter):
    """Write a plan in parts, each into a file named like that of a rank."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts in turn; return where each item is."""
        results: list[WriteResult] = []
        for number, items in enumerate(_parts(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"__{number}_")
            part = replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _parts(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """Return the items in order, in at most DATA_FILES parts of about equal bytes."""
    sized = [(item, _bytes(item)) for item in items]
    total = max(1, sum(size for _, size in sized))
    parts: dict[int, list[WriteItem]] = {}
    before = 0
    for item, size in sized:
        middle = before + size // 2
        parts.setdefault(min(DATA_FILES * middle // total, DATA_FILES - 1), []).append(item)
        before += size
    return list(parts.values())


def _bytes(item: WriteItem) -> int:
    """Return the bytes of a tensor; states are small and count as 0."""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
