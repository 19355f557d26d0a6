# SPDX-License-Identifier: Apache-2.0
"""Attention within documents: its pairs counted one by one, and the wait for the fullest."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from recipes.models import CARDS
from recipes.planner.documents import WHOLE, DocumentLengths, sequences_of
from recipes.planner.search.ranking import search
from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.units import K, M
from tests.recipes.planner.search.questions import question

H100 = cluster.load("dgx_h100")
UNEVEN = DocumentLengths(((50, 400), (300, 60), (2000, 10), (9000, 3)))


def attended(lengths: DocumentLengths, seq_length: int = 4096, **given):
    asked = {"ring": 1, "data_ranks": 1, "sequences": 4, "block": 0.0, **given}
    return lengths.attended(seq_length=seq_length, **asked)


def cut(lengths: DocumentLengths, seq_length: int, number: int) -> list[list[tuple[int, int]]]:
    """Return sequences cut from documents in random order, in random order: the parts of each."""
    draw, rows = Random(7), []
    values, weights = zip(*lengths.counts, strict=True)
    left = 0
    for _ in range(number):
        row, at = [], 0
        while at < seq_length:
            left = left or draw.choices(values, weights)[0]
            part = min(left, seq_length - at)
            row.append((at, at + part))
            at, left = at + part, left - part
        rows.append(row)
    draw.shuffle(rows)
    return rows


def pairs_of_ranks(row: list[tuple[int, int]], seq_length: int, ring: int) -> list[int]:
    """Return the causal pairs of each ring rank, counted token by token."""
    chunk, found = seq_length // (2 * ring), [0] * ring
    for first, end in row:
        for token in range(first, end):
            number = token // chunk
            found[min(number, 2 * ring - 1 - number)] += token - first + 1
    return found


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_the_time_is_that_of_the_pairs_of_the_fullest_rank_counted_one_by_one(ring: int):
    seq_length, ranks = 512, 4
    whole = seq_length**2 / 2
    counted = [pairs_of_ranks(row, seq_length, ring) for row in cut(UNEVEN, seq_length, 1000)]
    found = attended(UNEVEN, seq_length, ring=ring, data_ranks=ranks, sequences=2)
    everything = [sum(pairs) / whole for pairs in counted]
    assert found.mean == found.pairs == pytest.approx(sum(everything) / 1000, rel=0.04)
    fullest = [max(pairs) * ring / whole for pairs in counted]
    of_ranks = [(one + other) / 2 for one, other in zip(*[iter(fullest)] * 2, strict=True)]
    of_steps = [max(of_ranks[at : at + ranks]) for at in range(0, len(of_ranks), ranks)]
    assert found.slowest == pytest.approx(sum(of_steps) / len(of_steps), rel=0.07)


@pytest.mark.parametrize("seq_length", [4096, 64 * K, 1024 * K])
def test_the_mean_is_that_of_many_sequences_at_lengths_of_few_and_of_many_documents(seq_length):
    rare = DocumentLengths(((300, 990), (30_000, 10)))
    for lengths, near in ((UNEVEN, 0.04), (rare, 0.15)):
        rows = cut(lengths, seq_length, 16 * M // seq_length)
        squares = [sum((end - first) ** 2 for first, end in row) for row in rows]
        counted = sum(squares) / len(squares) / seq_length**2
        assert attended(lengths, seq_length).pairs == pytest.approx(counted, rel=near)


def test_sequences_are_full_and_short_documents_count_by_their_average():
    rows = sequences_of(UNEVEN, 4096)
    for row in rows:
        assert row[0].first == 0
        assert row[-1].end == 4096
        assert all(one.end == other.first for one, other in pairwise(row))
    inner = [part for row in rows for part in row[1:-1]]
    long = [part.attended for part in inner if not part.short]
    assert {round(tokens) for tokens in long} <= {300, 2000}
    assert {part.attended for part in inner if part.short} == {50}
    tokens = sum(part.end - part.first for row in rows for part in row if part.short)
    assert tokens / (4096 * len(rows)) == pytest.approx(400 * 50 / UNEVEN.tokens, rel=0.1)


@pytest.mark.parametrize(("seq_length", "ring"), [(1000, 3), (5, 4), (1, 8)])
def test_lengths_that_a_ring_does_not_divide_have_shares_too(seq_length, ring):
    found = attended(UNEVEN, seq_length, ring=ring, data_ranks=3)
    assert 0 < found.mean <= found.slowest <= 1


def test_documents_longer_than_all_sequences_leave_nothing_out():
    found = attended(DocumentLengths(((10**9, 1),)), ring=4, data_ranks=8, block=1024.0)
    assert tuple(found) == pytest.approx(WHOLE, rel=1e-5)  # but where two meet


def test_documents_of_one_length_take_its_share_and_no_rank_waits():
    found = attended(DocumentLengths(((512, 9),)), 512 * 8, data_ranks=8, sequences=64)
    assert found.pairs == pytest.approx(1 / 8 * (1 - 1 / 24))
    assert found.slowest == pytest.approx(found.mean, rel=0.03)


def test_kernels_are_slower_on_short_documents():
    assert attended(UNEVEN, block=1024.0).mean > 1.2 * attended(UNEVEN).mean


def test_ranks_wait_longer_the_more_there_are_and_shorter_over_more_sequences():
    few, many = (attended(UNEVEN, data_ranks=ranks).slowest for ranks in (2, 64))
    averaged = attended(UNEVEN, data_ranks=64, sequences=64).slowest
    assert attended(UNEVEN).mean < few < many
    assert averaged < many


def workload(documents: DocumentLengths | None, **layout) -> Workload:
    return Workload(
        card=CARDS["llama31_8b"], seq_length=128 * K, tokens_per_batch=4 * M,
        layout=Layout(**layout), gpus_per_node=8, documents=documents,
    )  # fmt: skip


def test_a_step_within_documents_takes_less_attention_and_has_the_mfu_of_its_own_work():
    lengths = DocumentLengths(((2 * K, 100), (64 * K, 4)))
    layout = {"tp": 2, "cp": ContextParallel.ulysses(4), "dp": 4}
    across, within = (time(workload(one, **layout), H100) for one in (None, lengths))
    found = within.attended
    assert 0 < found.pairs < found.mean < found.slowest < 1
    attention = across.categories["attention"]
    assert within.categories["attention"] == pytest.approx(found.mean * attention)
    assert within.categories["waiting"] == pytest.approx((found.slowest - found.mean) * attention)
    assert within.categories["matmul"] == across.categories["matmul"]
    assert "waiting" not in across.categories
    card = CARDS["llama31_8b"]
    flops = card.flops_per_token(round(128 * K * found.pairs))
    assert within.mfu == pytest.approx(within.tokens_per_gpu_second * flops / 989e12)


def test_a_ring_waits_within_a_sequence_and_an_all_to_all_does_not():
    lengths = DocumentLengths(((1 * K, 100), (100 * K, 2)))
    ring, ulysses = (
        time(workload(lengths, cp=kind(8)), H100)
        for kind in (ContextParallel.ring, ContextParallel.ulysses)
    )
    assert ulysses.categories["waiting"] == 0
    assert ring.categories["waiting"] > 0.1 * ring.categories["attention"]


def test_the_choice_within_short_documents_is_never_slower_than_across():
    asked = question(card=CARDS["llama31_8b"], seq_length=128 * K, gpus=64)
    within = replace(asked, documents=DocumentLengths(((4 * K, 1),)))
    fast, slow = search(within).plans[0], search(asked).plans[0]
    assert fast.time.step < 0.8 * slow.time.step


@pytest.mark.parametrize("counts", [(), ((0, 1),), ((5, 0),)])
def test_lengths_that_cannot_be_are_refused(counts):
    with pytest.raises(ValueError, match="document lengths are"):
        DocumentLengths(counts)
