# SPDX-License-Identifier: Apache-2.0
"""Bytes of attention within a window, counted as it runs, against the formulas."""

import pytest
import torch
import torch.distributed as dist

from custom_modules.attention.registry import CPU_FLASH
from custom_modules.attention.window import windowed
from custom_modules.context_parallel.attend import attend, split_group
from custom_modules.context_parallel.config import Degrees
from custom_modules.context_parallel.cost import AttentionShape
from custom_modules.profiling.byte_counter import ByteCounter
from tests.ranks import run_ranks

TOKENS, HEAD_DIM = 512, 16
CASES = [
    (heads, kv_heads, dtype, window, batch)
    for heads, kv_heads in ((8, 8), (8, 2))
    for dtype in (torch.float32, torch.bfloat16)
    for window in (64, 100, 256, 511)
    for batch in (1, 2)
]


def counted() -> list[tuple[int, int]]:
    """Return the peaks of forward and backward of each case."""
    groups, found = split_group(dist.group.WORLD, 1), []
    for heads, kv_heads, dtype, window, batch in CASES:
        leaves = [
            torch.randn(TOKENS, batch, n, HEAD_DIM, dtype=dtype, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        ]
        with ByteCounter() as counter:
            q, k, v = (leaf.clone() for leaf in leaves)
            kernel = windowed(CPU_FLASH, window)
            out = attend(q, k, v, kernel=kernel, groups=groups, causal=True)
            del q, k, v
            forward = counter.peak_bytes
            counter.restart()
            torch.autograd.grad(out, leaves, torch.randn_like(out))
        found.append((forward, counter.peak_bytes))
    return found


def test_the_formulas_of_a_window_are_the_bytes_that_its_kernel_holds():
    (found,) = run_ranks(counted, 1)
    for case, peaks in zip(CASES, found, strict=True):
        heads, kv_heads, dtype, window, batch = case
        shape = AttentionShape(
            degrees=Degrees(kind="ulysses", ulysses=1, ring=1, heads_per_stage=None, reason=""),
            heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, tokens=TOKENS, batch=batch,
            element_bytes=dtype.itemsize, window=window,
        )  # fmt: skip
        assert (shape.forward_peak, shape.backward_peak) == pytest.approx(peaks, rel=0.03), case


def test_a_window_of_all_tokens_holds_what_none_does():
    given = {
        "degrees": Degrees(kind="ring", ulysses=1, ring=4, heads_per_stage=None, reason=""),
        "heads": 8, "kv_heads": 2, "head_dim": 16, "tokens": 128,
    }  # fmt: skip
    none, all_tokens = (AttentionShape(**given, window=window) for window in (None, 512))
    peaks = ("forward_peak", "backward_peak", "forward_sent")
    assert [getattr(none, peak) for peak in peaks] == [getattr(all_tokens, one) for one in peaks]


def test_a_ring_sends_the_keys_that_a_window_reaches():
    shape = AttentionShape(
        degrees=Degrees(kind="ring", ulysses=1, ring=4, heads_per_stage=None, reason=""),
        heads=8, kv_heads=2, head_dim=16, tokens=128, window=33,
    )  # fmt: skip
    assert shape.forward_sent == 2 * 32 * 2 * 2 * 16 * 2  # 2 chunks, K and V, 2 heads of 16, bf16
