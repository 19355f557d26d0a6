# SPDX-License-Identifier: Apache-2.0
"""Seconds and bytes of process groups in large worlds, on one rank of PyTorch's fake backend.

No message is sent, so the seconds are those of the host: Megatron-Core asks torch.distributed on
every rank for every group of the job. NCCL connects the rank's own groups in addition.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.gpu_check.fake_ranks import rank_of

WORLDS = (1_024, 4_096, 16_384)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of layout; data parallelism fills the world."""

    name: str
    tp: int = 1
    cp: int = 1
    inner: int = 1
    """Ranks of context parallelism that exchange heads; rings join the rest."""
    pp: int = 1


KINDS = (
    Kind(name="TP 8", tp=8),
    Kind(name="TP 8, ring 16", tp=8, cp=16),
    Kind(name="TP 8, hybrid 4 x 4", tp=8, cp=16, inner=4),
    Kind(name="TP 4, hybrid 8 x 16", tp=4, cp=128, inner=8),
    Kind(name="TP 8, hybrid 4 x 4, PP 8", tp=8, cp=16, inner=4, pp=8),
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What making groups took on one rank."""

    groups: int
    """Calls of torch.distributed.new_group, those for other ranks' groups included."""
    seconds: float
    grown: int
    """Bytes by which the process grew."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The groups of one kind of layout in one world."""

    kind: str
    world_size: int
    megatron: Cost
    ours: Cost


def built(kind: Kind, world_size: int) -> Built:
    """Build the groups of rank 0."""
    from megatron.core import parallel_state
    from nemo.lightning import _strategy_lib

    from custom_modules.context_parallel.attend import split_group
    from recipes.nemo2.strategy import LongContextStrategy

    logging.getLogger("nemo_logger").setLevel(logging.ERROR)
    strategy = LongContextStrategy(
        process_group_backend="nccl",
        tensor_model_parallel_size=kind.tp,
        sequence_parallel=kind.tp > 1,
        context_parallel_size=kind.cp,
        pipeline_model_parallel_size=kind.pp,
        use_gloo_process_groups=False,
    )
    with rank_of(world_size):
        with _measured() as megatron:
            _strategy_lib.init_parallel_ranks(world_size, 0, 0, strategy.parallelism)
            _strategy_lib.init_model_parallel()
        with _measured() as ours:
            split_group(parallel_state.get_context_parallel_group(), kind.inner)
    return Built(
        kind=kind.name, world_size=world_size, megatron=Cost(**megatron), ours=Cost(**ours)
    )


@contextmanager
def _measured() -> Iterator[dict[str, Any]]:
    """Give a dict that holds the fields of a `Cost` when the context ends."""
    cost: dict[str, Any] = {}
    asked, real = [], dist.new_group

    def counted(*args: Any, **named: Any) -> Any:
        asked.append(1)
        return real(*args, **named)

    before, began = _resident(), time.perf_counter()
    with mock.patch.object(dist, "new_group", counted):
        yield cost
    cost.update(groups=len(asked), seconds=time.perf_counter() - began, grown=_resident() - before)


def _resident() -> int:
    """Return the bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
