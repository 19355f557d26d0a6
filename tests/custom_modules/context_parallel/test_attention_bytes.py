# SPDX-License-Identifier: Apache-2.0
"""Bytes counted on every rank against the formulas, and against plain arithmetic."""

import pytest
import torch

from custom_modules.context_parallel.config import Degrees, fits_ulysses, stage_sizes
from custom_modules.context_parallel.cost import AttentionShape
from tests.custom_modules.support.counted_bytes import (
    HEAD_DIM,
    HIDDEN,
    TOKENS,
    Case,
    Counted,
    counted,
)
from tests.ranks import run_ranks


def cases(size: int) -> list[Case]:
    """Return every degree and stage size of `size` ranks, in fp32 and some in other forms."""
    blocks = [
        (heads, kv_heads, ulysses, stage)
        for heads, kv_heads in ((16, 4), (16, 16), (8, 2), (4, 1), (6, 2))
        for ulysses in (1, 2, 4)
        if size % ulysses == 0 and fits_ulysses(heads, kv_heads, ulysses)
        for stage in (None, *stages(heads, kv_heads, ulysses))
    ]
    of_8_heads = [block for block in blocks if block[0] == 8]
    published = [(32, kv_heads, size, stage) for kv_heads in (8, 32) for stage in (None, 8)]
    if size == 4:  # other forms are those of fewer ranks
        return [Case(*block) for block in blocks + published]
    return [
        *(Case(*block) for block in blocks + published),
        *(Case(*block, causal=False) for block in of_8_heads),
        *(Case(*block, dtype=torch.bfloat16) for block in of_8_heads),
        *(Case(*block, batch=3) for block in of_8_heads),
    ]


def stages(heads: int, kv_heads: int, ulysses: int) -> list[int]:
    """Return each stage size, of 16 heads from 4 on: smaller ones take seconds."""
    return [n for n in stage_sizes(heads, kv_heads, ulysses) if heads < 16 or n >= 4]


def answers(mine: list[Case]) -> list[Counted]:
    return [counted(case) for case in mine]


@pytest.fixture(scope="module")
def on_1_ranks() -> dict[Case, tuple[Counted, ...]]:
    return of_each_rank(1)


@pytest.fixture(scope="module")
def on_2_ranks() -> dict[Case, tuple[Counted, ...]]:
    return of_each_rank(2)


@pytest.fixture(scope="module")
def on_4_ranks() -> dict[Case, tuple[Counted, ...]]:
    return of_each_rank(4)


def of_each_rank(size: int) -> dict[Case, tuple[Counted, ...]]:
    found = run_ranks(answers, size, cases(size))
    return dict(zip(cases(size), zip(*found, strict=True), strict=True))


@pytest.fixture
def ran(request, size) -> dict[Case, tuple[Counted, ...]]:
    """Return what each of `size` ranks counted."""
    return request.getfixturevalue(f"on_{size}_ranks")


def shape(case: Case, size: int, rank: int) -> AttentionShape:
    return AttentionShape(
        degrees=Degrees(
            kind="hybrid",
            ulysses=case.ulysses,
            ring=size // case.ulysses,
            heads_per_stage=case.heads_per_stage,
            reason="",
        ),
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        tokens=TOKENS,
        batch=case.batch,
        element_bytes=case.dtype.itemsize,
        causal=case.causal,
        ring_rank=rank // case.ulysses,
    )


def gradient_bytes(case: Case) -> int:
    """Return the bytes of dx and dW, which the formula leaves out where a block begins at x."""
    if case.heads_per_stage is None:
        return 0
    rows = (case.heads + 2 * case.kv_heads) * HEAD_DIM
    return (TOKENS * case.batch + rows) * HIDDEN * case.dtype.itemsize


def named(value: object) -> str:
    if not isinstance(value, Case):
        return f"{value} ranks"
    stage = "all" if value.heads_per_stage is None else value.heads_per_stage
    form = "causal" if value.causal else "full"
    return (
        f"{value.heads}/{value.kv_heads} heads over {value.ulysses}-{stage} at a time-{form}"
        f"-b={value.batch}-{str(value.dtype)[6:]}"
    )


ALL = pytest.mark.parametrize(
    ("size", "case"), [(size, case) for size in (1, 2, 4) for case in cases(size)], ids=named
)


@ALL
def test_a_forward_holds_the_bytes_of_the_formula(ran, size, case):
    for rank, found in enumerate(ran[case]):
        formula = shape(case, size, rank)
        surplus = 0
        if case.batch > 1:
            # The formula packs an output to be sent home; this kernel's lies in the order to send.
            at_a_time = case.heads_per_stage or case.heads
            surplus = at_a_time * (case.ulysses - 1) * formula.slice_bytes // case.ulysses
        lowest = formula.forward_peak - surplus
        assert lowest <= found.forward_peak <= formula.forward_peak


def copied_weight_bytes(case: Case) -> int:
    """Return the bytes of rows of the weight and of their gradient, which the formula leaves out.

    They live while the next stage is exchanged, which may be when the most is held.
    """
    if case.heads_per_stage is None or case.ulysses == 1:
        return 0
    rows = case.heads_per_stage * HEAD_DIM
    return 2 * rows * HIDDEN * case.dtype.itemsize + 8 * case.heads_per_stage


@ALL
def test_a_backward_holds_the_bytes_of_the_formula(ran, size, case):
    for rank, found in enumerate(ran[case]):
        expected = shape(case, size, rank).backward_peak + gradient_bytes(case)
        assert expected <= found.backward_peak <= expected + copied_weight_bytes(case)


@ALL
def test_a_forward_sends_the_bytes_of_the_formula(ran, size, case):
    for rank, found in enumerate(ran[case]):
        assert found.forward_sent == shape(case, size, rank).forward_sent


SLICE = TOKENS * HEAD_DIM * 4  # bytes of a head of a rank's tokens, fp32 and a batch of 1
LSE = TOKENS * 4  # and of its log-sum-exp
SIZES = pytest.mark.parametrize("size", [2, 4], ids=named)
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (16, 4), (8, 2), (4, 1)])


@SIZES
@HEADS
def test_a_ring_sends_the_keys_and_values_of_all_but_one_rank(ran, size, heads, kv_heads):
    full_k_and_v = 2 * kv_heads * SLICE * size
    for found in ran[Case(heads, kv_heads, 1)]:
        assert found.forward_sent == (size - 1) / size * full_k_and_v
        dk_and_dv = 2 * kv_heads * SLICE * size  # of this rank, once for each rank
        assert found.backward_sent == found.forward_sent + dk_and_dv


@SIZES
@HEADS
def test_ulysses_sends_what_it_has_less_its_own_share(ran, size, heads, kv_heads):
    q_and_out = 2 * heads * SLICE
    k_and_v = 2 * max(kv_heads, size) * SLICE  # a KV head goes to each rank that needs it
    for found in ran[Case(heads, kv_heads, size)]:
        assert found.forward_sent == (size - 1) / size * (q_and_out + k_and_v)
        assert found.backward_sent == found.forward_sent


@SIZES
@HEADS
def test_head_chunks_send_in_the_forward_what_ulysses_sends(ran, size, heads, kv_heads):
    for stage in stages(heads, kv_heads, size):
        for found in ran[Case(heads, kv_heads, size, stage)]:
            assert found.forward_sent == ran[Case(heads, kv_heads, size)][0].forward_sent
            # out, its gradient, q again and dq; k and v again, dk and dv
            slices = 4 * heads + 4 * max(kv_heads, size)
            assert found.backward_sent == (size - 1) / size * slices * SLICE


@SIZES
@HEADS
def test_between_forward_and_backward_live_the_output_and_what_is_kept(ran, size, heads, kv_heads):
    out, lse = heads * SLICE, heads * LSE
    given = (heads + 2 * kv_heads) * SLICE
    exchanged = (2 * heads + 2 * max(kv_heads, size)) * SLICE
    for rank in range(size):
        assert ran[Case(heads, kv_heads, 1)][rank].kept == given + out + lse
        assert ran[Case(heads, kv_heads, size)][rank].kept == exchanged + out + lse
        for stage in stages(heads, kv_heads, size):
            assert ran[Case(heads, kv_heads, size, stage)][rank].kept == out + lse


@SIZES
@pytest.mark.parametrize(("heads", "kv_heads", "bound"), [(32, 8, 0.55), (32, 32, 0.30)])
def test_eight_heads_at_a_time_hold_a_part_of_ulysses_bytes(ran, size, heads, kv_heads, bound):
    """Bytes of q, k, v and all-to-all: what lives at the peak but for the output itself."""
    before_and_after = 2 * (heads + 2 * kv_heads) * SLICE
    output = heads * SLICE
    for rank in range(size):
        chunked = ran[Case(heads, kv_heads, size, 8)][rank].forward_peak - output
        ulysses = ran[Case(heads, kv_heads, size)][rank].forward_peak - output
        assert ulysses >= before_and_after
        assert chunked <= bound * before_and_after
