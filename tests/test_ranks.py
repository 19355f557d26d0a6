# SPDX-License-Identifier: Apache-2.0
"""Results and failures of `run_ranks`, and of ranks that are kept for several functions."""

import os
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from benchmarks.harness.kept_ranks import HOST_ID, KeptRanks, KeptSets, _environment
from custom_modules.attention.documents import Documents
from tests import ranks as of_tests
from tests import warm_start
from tests.conditions import until
from tests.custom_modules.support.plain_attention import PLAIN
from tests.custom_modules.support.zigzag import made_up
from tests.ranks import Ranks, run_ranks
from tests.reference.attention import attention_with_gradients


def sum_of_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def computes_for_a_second() -> None:
    end = time.process_time() + 1
    while time.process_time() < end:
        pass


def rank_1_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("odd length")
    dist.barrier()


def rank_1_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_0_never_ends() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def rank_starts_a_process(told: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    told.with_suffix(".part").write_text(str(child.pid))
    told.with_suffix(".part").rename(told)
    child.wait()


def is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_come_in_rank_order():
    assert run_ranks(sum_of_ranks, 2, 10) == [(0, 21), (1, 21)]


@pytest.mark.skipif(find_spec("nemo") is None, reason="without NeMo nothing is forked")
def test_what_ranks_compute_is_counted_under_the_test_that_ran_them():
    run_ranks(computes_for_a_second, 2)
    counted = warm_start.computed(wait=False)
    test = os.environ["PYTEST_CURRENT_TEST"]
    seconds = max(seconds for of_test, seconds in counted if of_test == test)
    assert seconds >= 2
    assert (of_tests.MEGATRON.first_test, -seconds) in counted


def test_the_rank_that_failed_is_named_with_its_error():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*ValueError: odd length"):
        run_ranks(rank_1_fails, 2)


def test_the_rank_that_was_killed_is_named():
    with pytest.raises(RuntimeError, match="rank 1 of 2 died with exit code -9"):
        run_ranks(rank_1_is_killed, 2)


def test_a_rank_that_hangs_is_named():
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2"):
        run_ranks(rank_0_never_ends, 2, timeout_seconds=15)


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    with Ranks(rank_starts_a_process, 1, tmp_path / "child") as ranks:
        place = tmp_path / "child"
        child = int(until(lambda: place.read_text() if place.exists() else not ranks.running()))
        assert is_alive(child)
    until(lambda: not is_alive(child))


def groups_that_are_left() -> tuple[int, bool, Tensor]:
    """Leave Megatron-Core's groups to whoever comes next; return what came before, and a tensor."""
    with of_tests.megatron_backend():
        before = parallel_state.model_parallel_is_initialized()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        total = torch.ones(2)
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return os.getpid(), before, total


def test_kept_ranks_run_several_functions_and_leave_no_groups():
    with KeptRanks(2) as ranks:
        assert ranks.run(sum_of_ranks, 10) == [(0, 21), (1, 21)]
        first, second = ranks.run(groups_that_are_left), ranks.run(groups_that_are_left)
    for one, again in zip(first, second, strict=True):
        assert one[0] == again[0] != os.getpid()
        assert not one[1]
        assert not again[1]
        assert again[2].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("function", "seconds", "error", "words"),
    [
        (rank_1_fails, 60, RuntimeError, r"(?s)rank 1 of 2 failed.*ValueError: odd length"),
        (rank_1_is_killed, 60, RuntimeError, "rank 1 of 2 died with exit code -9"),
        (rank_0_never_ends, 5, TimeoutError, r"ranks \[0\] of 2 had not ended in 5 s"),
    ],
    ids=["fails", "is killed", "hangs"],
)
def test_a_kept_rank_that_goes_wrong_is_named_and_all_are_ended(function, seconds, error, words):
    ranks = KeptRanks(2)
    assert ranks.run(sum_of_ranks, 10) == [(0, 21), (1, 21)]
    with pytest.raises(error, match=words):
        ranks.run(function, timeout_seconds=seconds)
    assert ranks.ended


def test_a_set_that_failed_is_started_anew(monkeypatch):
    with KeptSets("cpu") as kept:
        monkeypatch.setattr(of_tests, "KEPT", kept)
        with pytest.raises(RuntimeError, match="odd length"):
            run_ranks(rank_1_fails, 2)
        assert run_ranks(sum_of_ranks, 2, 10) == [(0, 21), (1, 21)]


def test_ranks_of_one_gpu_are_hosts_of_their_own_to_nccl():
    first, second = (_environment(rank, 2, "cuda") for rank in range(2))
    assert {name for name in first if first[name] != second[name]} == {HOST_ID}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("documents", [None, [[1, 4, 2], [7]]], ids=["whole", "documents"])
def test_the_kernel_of_the_parity_tests_is_the_formula(causal, documents):
    q, k, v, grad_out = made_up((2, 6, 7, 5), (2, 2, 7, 5), (2, 2, 7, 5), (2, 6, 7, 5))
    table = None if documents is None else Documents.of(documents)
    out, lse = PLAIN.forward(q, k, v, causal, table)
    found = (out, *PLAIN.backward(grad_out, q, k, v, out, lse, causal, table))
    right = attention_with_gradients(q, k, v, grad_out, causal=causal, documents=documents)
    for ours, expected in zip(found, right, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
