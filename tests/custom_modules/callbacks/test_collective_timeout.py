# SPDX-License-Identifier: Apache-2.0
"""The waiting time of collectives reaches every group, and gloo keeps its own."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from custom_modules.callbacks.collective_timeout import CollectiveTimeout
from tests.ranks import Ranks

SECONDS = 4321


def _timeouts(backend: str) -> list[timedelta]:
    """Return the timeout of each group of this rank after the callback has met one backend."""
    from megatron.core import parallel_state

    from custom_modules.cpu.backend import cpu_backend

    with cpu_backend(force=True), mock.patch.object(dist, "get_backend", return_value=backend):
        parallel_state.initialize_model_parallel(context_parallel_size=2)
        CollectiveTimeout(SECONDS).setup(SimpleNamespace(), SimpleNamespace(), "fit")
    groups = [*parallel_state._global_process_group_list, dist.group.WORLD]
    backends = [
        group._get_backend(torch.device("cpu"))
        for group in groups
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER)
    ]
    return [one.options._timeout for one in backends]


@pytest.mark.parametrize(("backend", "changed"), [("nccl", True), ("gloo", False)])
def test_all_groups_of_nccl_wait_as_long_as_planned(backend, changed):
    with Ranks(_timeouts, 2, backend) as ranks:
        for found in ranks.results(timeout_seconds=400):
            assert len(found) > 4
            assert {one == timedelta(seconds=SECONDS) for one in found} == {changed}


def test_no_waiting_at_all_is_refused():
    with pytest.raises(ValueError, match="collectives wait 0 seconds"):
        CollectiveTimeout(0)
