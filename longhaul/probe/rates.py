# SPDX-License-Identifier: Apache-2.0
"""Rates that the ranks of this machine reach, all at the same time, as in training."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from longhaul.local_ranks import run_on_ranks

SECONDS, MOST = 1.0, 50
"""Time for each measurement, and its most repeats."""
SIZES = {
    "cuda": {"product": 8192, "tokens": 32_768, "message": 2**30},
    "cpu": {"product": 1024, "tokens": 2048, "message": 2**25},
}
"""Rows of a product, tokens of an attention, bytes of a message."""
HEADS, HEAD_DIM = 4, 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of a rank; the median of all ranks."""

    product: float
    """FLOP/s of a large matrix product, bf16 on GPUs and fp32 on CPU."""
    attention_forward: float
    """FLOP/s of causal attention, without those of the masked half."""
    attention_backward: float
    memory: float
    """Bytes per second of a sum of two tensors."""
    exchange: float
    """Bytes per second that a rank sends in an all-to-all; 0 for a single rank."""


def rates(ranks: int, device: str) -> tuple[Rates, str]:
    """Return the rates of this machine's ranks, and the name of the attention kernel."""
    found = run_on_ranks(_rank, ranks, device)
    kernel = found[0][1]
    each = [one for one, _ in found]
    middle = {name.name: median(one[name.name] for one in each) for name in fields(Rates)}
    return Rates(**middle), kernel


def _rank(rank: int, ranks: int, folder: str, device: str, results: Any) -> None:
    """Measure on this rank."""
    import torch
    import torch.distributed as dist

    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
    )  # fmt: skip
    try:
        found, kernel = _measured(where, ranks)
        results.put((asdict(found), kernel))
    finally:
        dist.destroy_process_group()


def _measured(device: Any, ranks: int) -> tuple[Rates, str]:
    import torch
    import torch.distributed as dist

    from custom_modules.attention.registry import kernel_for

    sizes = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, tokens = sizes["product"], sizes["tokens"]
    square = torch.randn(rows, rows, dtype=dtype, device=device)
    product = 2 * rows**3 / _typical(lambda: square @ square, device)

    kernel = kernel_for(device, dtype, HEAD_DIM)
    q, k, v, grad = (
        torch.randn(1, HEADS, tokens, HEAD_DIM, dtype=dtype, device=device) for _ in range(4)
    )
    out, lse = kernel.forward(q, k, v, True, None)
    unit = HEADS * HEAD_DIM * tokens**2
    forward = 2 * unit / _typical(lambda: kernel.forward(q, k, v, True, None), device)
    backward = (
        5 * unit / _typical(lambda: kernel.backward(grad, q, k, v, out, lse, True, None), device)
    )

    numbers = sizes["message"] // dtype.itemsize // ranks * ranks
    one, other, into = (torch.ones(numbers, dtype=dtype, device=device) for _ in range(3))
    memory = 3 * one.nbytes / _typical(lambda: torch.add(one, other, out=into), device)
    exchange = 0.0
    if ranks > 1:
        seconds = _typical(lambda: dist.all_to_all_single(into, one), device)
        exchange = one.nbytes * (ranks - 1) / ranks / seconds
    found = Rates(
        product=product, attention_forward=forward, attention_backward=backward,
        memory=memory, exchange=exchange,
    )  # fmt: skip
    return found, kernel.name


def _typical(run: Callable[[], object], device: Any) -> float:
    """Return the median seconds of a call; all ranks begin together and call it as often."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    once()
    took = torch.tensor([once()], dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    repeats = max(3, min(MOST, int(SECONDS / max(float(took), 1e-6))))
    return median(once() for _ in range(repeats))
