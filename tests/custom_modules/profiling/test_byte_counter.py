# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist

from custom_modules.context_parallel.p2p import post
from custom_modules.profiling.byte_counter import ByteCounter
from tests.ranks import run_ranks

KIB = 256
"""Elements of fp32."""


def test_a_tensor_lives_until_it_is_freed():
    with ByteCounter() as ledger:
        a = torch.zeros(KIB)
        assert ledger.live_bytes == 1024
        b = torch.zeros(2 * KIB)
        assert ledger.live_bytes == 3 * 1024
        del a
        assert ledger.live_bytes == 2 * 1024
        del b
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, 3 * 1024)


def test_the_peak_is_of_what_lives_together():
    with ByteCounter() as ledger:
        for _ in range(3):
            torch.zeros(KIB)
    assert ledger.peak_bytes == 1024


def test_a_temporary_counts_while_an_expression_needs_it():
    with ByteCounter() as ledger:
        a = torch.zeros(KIB)
        b = (a + 1) * 2
    assert (ledger.live_bytes, ledger.peak_bytes) == (2 * 1024, 3 * 1024)
    del b


def test_views_and_results_in_place_are_counted_once():
    with ByteCounter() as ledger:
        a = torch.zeros(4, KIB)
        a.add_(1)
        views = [a[0], a.t(), a.view(-1)]
        torch.add(a, 1, out=a)
        assert ledger.live_bytes == 4 * 1024
        del a
        assert ledger.live_bytes == 4 * 1024, "a view holds the storage"
        del views
        assert ledger.live_bytes == 0


def test_a_slice_holds_all_of_its_storage():
    with ByteCounter() as ledger:
        first = torch.zeros(4, KIB)[0]
        assert ledger.live_bytes == 4 * 1024
    assert first.numel() == KIB


def test_bytes_follow_the_dtype():
    with ByteCounter() as ledger:
        held = [torch.zeros(KIB, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    assert ledger.live_bytes == 512 + 2048
    del held


def test_tensors_from_before_are_not_counted():
    before = torch.zeros(KIB)
    with ByteCounter() as ledger:
        views = before[:10], before.add_(1)
        assert ledger.peak_bytes == 0
        after = before + 1
        assert ledger.peak_bytes == 1024
    del before, views, after


def test_nothing_is_counted_outside_and_what_dies_there_is():
    with ByteCounter() as ledger:
        a = torch.zeros(KIB)
    b = torch.zeros(KIB)
    assert ledger.live_bytes == 1024
    del a
    assert ledger.live_bytes == 0
    del b


def test_restarting_forgets_the_peak_but_not_what_lives():
    with ByteCounter() as ledger:
        a, b = torch.zeros(KIB), torch.zeros(KIB)
        del b
        ledger.restart()
        assert ledger.peak_bytes == 1024
        b = torch.zeros(2 * KIB)
    assert (ledger.peak_bytes, ledger.sent_bytes) == (3 * 1024, 0)
    del a, b


def test_saved_tensors_and_gradients_are_counted():
    leaf = torch.ones(KIB, requires_grad=True)
    with ByteCounter() as ledger:
        total = (leaf * 2).exp().sum()  # exp saves its result
        assert ledger.live_bytes == 1024 + 4
        total.backward()
        assert leaf.grad is not None
        del total
        assert ledger.live_bytes == 1024, "the gradient alone"


def sent() -> tuple[int, int, int]:
    """Return the bytes sent by two messages, by an all-to-all, and after a restart."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with ByteCounter() as ledger:
        number, received = torch.zeros(KIB), torch.zeros(KIB)
        to, before = [((rank + 1) % size, number)] * 2, [((rank - 1) % size, received)] * 2
        post(to, before, dist.group.WORLD).wait()
        by_messages = ledger.sent_bytes
        ledger.restart()
        dist.all_to_all_single(torch.empty(size * KIB), torch.zeros(size * KIB))
        by_all_to_all = ledger.sent_bytes
        ledger.restart()
    return by_messages, by_all_to_all, ledger.sent_bytes


@pytest.fixture(scope="module")
def sent_on_3_ranks() -> list[tuple[int, int, int]]:
    return run_ranks(sent, 3)


def test_messages_are_counted_by_who_sends_them(sent_on_3_ranks):
    assert [messages for messages, _, _ in sent_on_3_ranks] == [2 * 1024] * 3


def test_of_an_all_to_all_counts_what_leaves_the_rank(sent_on_3_ranks):
    assert [all_to_all for _, all_to_all, _ in sent_on_3_ranks] == [2 * 1024] * 3


def test_restarting_forgets_what_was_sent(sent_on_3_ranks):
    assert [after for _, _, after in sent_on_3_ranks] == [0] * 3
