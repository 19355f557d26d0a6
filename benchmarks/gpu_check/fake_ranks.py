# SPDX-License-Identifier: Apache-2.0
"""One rank of a job of any size without the others: the fake backend communicates nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

MINUTES = timedelta(minutes=10)


def _all_alike(found: list[object], mine: object, group: object = None) -> None:
    """Gather objects as if all ranks had the same."""
    found[:] = [mine] * len(found)


@contextmanager
def rank_of(world_size: int, rank: int = 0) -> Iterator[None]:
    """Act as one rank of a job: the fake backend's groups and collectives, torchrun's variables."""
    from megatron.core import parallel_state

    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 8),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(min(8, world_size)),
        "GROUP_RANK": str(rank // 8),
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    options = SimpleNamespace(_timeout=MINUTES)  # the fake backend has none
    backend = SimpleNamespace(options=options, supports_coalescing=False)
    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=backend),
        mock.patch.object(dist, "all_gather_object", _all_alike),
    ):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
