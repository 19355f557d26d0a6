# SPDX-License-Identifier: Apache-2.0
"""Attention within a window on one rank and over 2 and 4, against the formula on one."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.registry import CPU_FLASH
from custom_modules.attention.window import parts_before, parts_of, windowed
from custom_modules.context_parallel.attend import Groups, attend, split_group
from custom_modules.context_parallel.halo import transfers
from tests.custom_modules.support.plain_attention import kernel
from tests.custom_modules.support.zigzag import differences, made_up, shard_of
from tests.ranks import run_ranks, some
from tests.reference.attention import attention_with_gradients

LENGTH, BATCH, HEAD_DIM = 48, 2, 6
# Chunks of 12 on two ranks, of 6 on four: within one, up to it, over several, nearly all, all.
WINDOWS = (1, 2, 5, 6, 7, 12, 13, 29, 47, 48, 100)
DOCUMENTS = {
    "none": None,
    "many": [[1, 7, 13, 24, 1, 2], [48]],
    "long": [[31, 17], [5, 6, 1, 29, 7]],
    "single tokens": [[1] * 48, [47, 1]],
}


class Case(NamedTuple):
    window: int
    ulysses: int = 1
    documents: str = "none"
    packed: bool = False
    """Whether the kernel takes documents of any lengths in one call."""
    dtype: torch.dtype = torch.float64


def cases(size: int) -> list[Case]:
    degrees = [ulysses for ulysses in (1, 2, 4) if size % ulysses == 0]
    every = [Case(*one) for one in product(WINDOWS, degrees, DOCUMENTS)]
    packed = [Case(7, 1, documents, packed=True) for documents in DOCUMENTS]
    return some([*every, *packed, Case(7, 1, "long", dtype=torch.bfloat16)])


def tokens(dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, [S, b, heads, D]."""
    return made_up(*((LENGTH, BATCH, n, HEAD_DIM) for n in (4, 2, 2, 4)), dtype=dtype)


def sharded(case: Case, mine: list[int], groups: Groups) -> list[Tensor]:
    """Return the output and gradients of some tokens, [s, b, heads, D]."""
    *leaves, grad_out = (t[mine] for t in tokens(case.dtype))
    for leaf in leaves:
        leaf.requires_grad_()
    lengths = DOCUMENTS[case.documents]
    out = attend(
        *leaves,
        kernel=replace(kernel(), packed=case.packed),
        groups=groups,
        causal=True,
        documents=None if lengths is None else Documents.of(lengths),
        window=case.window,
    )
    assert out.dtype == case.dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def answers(size: int) -> list[list[Tensor]]:
    """Run all in one set of ranks, since a rank takes seconds to start."""
    mine = shard_of(LENGTH, dist.get_rank(), size)
    return [sharded(one, mine, split_group(dist.group.WORLD, one.ulysses)) for one in cases(size)]


@pytest.fixture(scope="module")
def on_2_ranks() -> list[list[list[Tensor]]]:
    return run_ranks(answers, 2, 2)


@pytest.fixture(scope="module")
def on_4_ranks() -> list[list[list[Tensor]]]:
    return run_ranks(answers, 4, 4)


@cache
def expected(window: int, documents: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the whole output and gradients, [S, b, heads, D], by the formula."""
    q, k, v, grad_out = (t.permute(1, 2, 0, 3) for t in tokens(dtype))
    right = attention_with_gradients(
        q, k, v, grad_out, causal=True, documents=DOCUMENTS[documents], window=window
    )
    return [t.permute(2, 0, 1, 3) for t in right]


def require_right(case: Case, found: list[Tensor], mine: list[int]) -> None:
    right = [t[mine] for t in expected(case.window, case.documents, case.dtype)]
    away = differences(found, right)
    if case.dtype == torch.float64:
        assert max(away.values()) < 1e-12, (case, away)
        return
    largest = dict(zip(away, (t.abs().max().item() for t in right), strict=True))
    assert all(away[name] < 2**-6 * largest[name] for name in away), (case, away)


@pytest.mark.parity
@pytest.mark.parametrize("size", [1, 2, 4], ids="{} ranks".format)
def test_the_output_and_its_gradients_are_those_of_the_formula(request, size):
    if size == 1:
        whole = list(range(LENGTH))
        ran = [[sharded(case, whole, Groups(None, None)) for case in cases(1)]]
    else:
        ran = request.getfixturevalue(f"on_{size}_ranks")
    for rank, found in enumerate(ran):
        for case, one in zip(cases(size), found, strict=True):
            require_right(case, one, shard_of(LENGTH, rank, size) if size > 1 else whole)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", [1, 5, 12, 48, 49])
def test_parts_are_each_pair_of_the_window_once(window, length):
    seen = torch.zeros(length, length, dtype=torch.int64)
    for part in parts_of([(slice(None), 0, length)], window):
        for block in range(part.count):
            moved = part.moved(block * part.step, block * part.step)
            here = seen[slice(*moved.queries), slice(*moved.keys)]
            every = torch.ones_like(here)
            here += {"whole": every, "causal": every.tril(), "backward": every.triu()}[part.way]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    assert torch.equal(seen, ((distance >= 0) & (distance < window)).long())


@pytest.mark.parametrize("least", [-20, -7, -1, 0, 1, 4, 9])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (7, 3), (3, 7), (1, 1), (4, 0)])
def test_parts_over_earlier_keys_are_each_pair_once(queries, keys, least):
    seen = torch.zeros(queries, keys, dtype=torch.int64)
    for part in parts_before(slice(None), queries, keys, least):
        here = seen[slice(*part.queries), slice(*part.keys)]
        every = torch.ones_like(here)
        here += every if part.way == "whole" else every.triu()
        assert here.numel()
    wanted = torch.arange(keys)[None] >= torch.arange(queries)[:, None] + least
    assert torch.equal(seen, wanted.long())


class Counting:
    """A kernel for documents of any lengths that counts its calls."""

    def __init__(self) -> None:
        self.packed = self.others = 0

    def kernel(self) -> AttentionKernel:
        def forward(q, k, v, causal, documents):
            self.packed += documents is not None
            self.others += documents is None
            return kernel().forward(q, k, v, causal, documents)

        return replace(kernel(), forward=forward, packed=True)


def calls_of_short_documents() -> tuple[int, int]:
    counting = Counting()
    q, k, v, _ = (t[: LENGTH // 2] for t in tokens(torch.float64))
    documents = Documents.of([[2] * 24] * BATCH)
    groups = split_group(dist.group.WORLD, 1)
    attend(q, k, v, kernel=counting.kernel(), groups=groups, causal=True, documents=documents,
           window=4)  # fmt: skip
    return counting.packed, counting.others


@pytest.mark.parity
def test_documents_within_the_window_are_one_call_also_over_a_ring():
    assert run_ranks(calls_of_short_documents, 2) == [(1, 0)] * 2


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_chunk_gets_the_tokens_before_it_that_its_first_attends_to(size, window):
    chunk = 3
    got: dict[int, list[int]] = {number: [] for number in range(2 * size)}
    for one in transfers(size, chunk, window):
        assert one.at == len(got[one.to_chunk])
        got[one.to_chunk] += range(*(one.from_chunk * chunk + t for t in one.tokens))
    for number, tokens_before in got.items():
        first = max(0, number * chunk - window + 1)
        assert tokens_before == list(range(first, number * chunk))


def test_a_window_needs_causal_attention_and_a_token():
    q, k, v = (t.permute(1, 2, 0, 3) for t in tokens(torch.float64)[:3])
    with pytest.raises(ValueError, match="a window of 3 is causal; whole attention has none"):
        windowed(CPU_FLASH, 3).forward(q, k, v, False, None)
    with pytest.raises(ValueError, match="the window of attention is 0 tokens; it is at least 1"):
        windowed(CPU_FLASH, 0)
