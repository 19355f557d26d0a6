# SPDX-License-Identifier: Apache-2.0
"""What one rank of an all-to-all computes on a GPU, against its bare attention kernel.

    python -m benchmarks.attention_on_gpu

Claim: from 128K tokens up the block runs at 0.95 of the bare kernel's rate or better.

One process takes the place of rank 0 of C ranks: H heads and G KV heads over S tokens are, on a
rank, S / C tokens of all heads before the exchange and all S tokens of H / C heads after it. The
exchange is a copy of the same size within the device (`benchmarks.harness.loopback`), so what is
measured is everything of the block but the link. Per length and kernel:

* the bare kernel: H / C query heads over S tokens, laid out as the exchange leaves them;
* Ulysses from q, k, v: what its packing, copies and saving add to that kernel;
* per U, head-chunked attention from x, beside Ulysses from x with the same projection: time, and
  the most bytes allocated. With the first kernel alone, the one that `auto` takes.

TFLOP/s count 4 S^2 D / 2 for each head of the rank forward, and 2.5 times as much backward: the
projection is not counted. Peak bytes are the allocator's on CUDA, of x or q, k, v on; on CPU those
of `custom_modules.profiling.byte_counter`.

A case runs once to warm up, then as often as `--seconds` allows, at least twice. With the default
lengths and two kernels, at half a PFLOP/s, that is some 5 minutes, 3 of them at 1M.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.loopback import loopback
from benchmarks.harness.machine import facts
from benchmarks.harness.page import milliseconds, name_of, page, table, write
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.qkv_projection import Projection
from custom_modules.attention.registry import KERNELS, kernel_for
from custom_modules.context_parallel.attend import Groups, attend
from custom_modules.context_parallel.config import fits_ulysses, stage_sizes
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies, rotary_table, rotate
from custom_modules.tensor_parallel import TensorParallel

K = 1024
LENGTHS = [32 * K, 128 * K, 256 * K, 512 * K, 1024 * K]
LEAST_RATE, FROM_LENGTH = 0.95, 128 * K
Table = tuple[Tensor, Tensor]
Leaves = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The attention of all ranks, and the device of this one."""

    seq: int
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device

    @property
    def forward_flops(self) -> float:
        """Of the rank's share of heads, causal."""
        return 4 * self.seq**2 * self.head_dim / 2 * self.heads / self.ranks

    def drawn(self, *shape: int) -> Tensor:
        """Return a tensor of the device."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A block: its inputs, made anew, and what leads from them to an output [., 1, n, D]."""

    name: str
    make: Callable[[], Leaves]
    attend: Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Seconds of forward and backward, and the most bytes held; `reason` where it could not run."""

    forward: float = float("nan")
    backward: float = float("nan")
    peak_bytes: int = 0
    reason: str = ""

    @property
    def both(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


class _Bare(torch.autograd.Function):
    """The kernel alone, saving what its backward needs."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel):  # type: ignore[no-untyped-def]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out, lse = kernel.forward(q, k, v, True, None)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        gradients = ctx.kernel.backward(
            grad_out.permute(1, 2, 0, 3), *ctx.saved_tensors, True, None
        )
        return *(grad.permute(2, 0, 1, 3) for grad in gradients), None


def cases(
    shape: Shape, kernel: AttentionKernel, group: dist.ProcessGroup, *, from_x: bool
) -> Iterator[Case]:
    """Yield the bare kernel first, then the blocks around it, those from x if asked for."""
    tokens, kv_share = shape.seq // shape.ranks, max(1, shape.kv_heads // shape.ranks)
    share = shape.heads // shape.ranks
    groups = Groups(ulysses=group, ring=None)
    ulysses = partial(attend, kernel=kernel, groups=groups, causal=True)

    def qkv(length: int, heads: int, kv_heads: int) -> Leaves:
        sizes = (heads, kv_heads, kv_heads)
        return tuple(shape.drawn(length, 1, n, shape.head_dim) for n in sizes)

    def x_and_weight() -> Leaves:
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return shape.drawn(tokens, 1, shape.hidden), shape.drawn(rows, shape.hidden) / 64

    yield Case(
        name="bare kernel",
        make=partial(qkv, shape.seq, share, kv_share),
        attend=lambda *leaves: _Bare.apply(*leaves, kernel),
    )
    yield Case(
        name="ulysses",
        make=partial(qkv, tokens, shape.heads, shape.kv_heads),
        attend=ulysses,
    )
    if not from_x:
        return
    turn = _table(shape, tokens)
    yield Case(
        name="ulysses from x",
        make=x_and_weight,
        attend=partial(_projected, shape, ulysses, turn),
    )
    for stage in stage_sizes(shape.heads, shape.kv_heads, shape.ranks):
        yield Case(
            name=f"head_chunked, U = {stage}",
            make=x_and_weight,
            attend=partial(_head_chunked, shape, kernel, group, turn, stage),
        )


def _table(shape: Shape, tokens: int) -> Table:
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(500_000), shape.head_dim)
    positions = torch.arange(tokens, device=shape.device)[None]
    return rotary_table(positions, frequencies.to(shape.device))


def _projected(
    shape: Shape, attend: Callable[..., Tensor], turn: Table, x: Tensor, weight: Tensor
) -> Tensor:
    per_kv = shape.heads // shape.kv_heads
    mixed = torch.nn.functional.linear(x, weight)
    q, k, v = mixed.unflatten(2, (shape.kv_heads, per_kv + 2, -1)).split([per_kv, 1, 1], 3)
    return attend(rotate(q.flatten(2, 3), *turn), rotate(k[:, :, :, 0], *turn), v[:, :, :, 0])


def _head_chunked(
    shape: Shape, kernel: AttentionKernel, group: dist.ProcessGroup, turn: Table, stage: int,
    x: Tensor, weight: Tensor,
) -> Tensor:  # fmt: skip
    block = HeadChunked(
        projection=Projection(
            weight=weight, bias=None, heads=shape.heads, kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, q_norm=None, k_norm=None,
        ),
        stages=HeadStages(
            heads=shape.heads, kv_heads=shape.kv_heads, ranks=shape.ranks, heads_per_stage=stage
        ),
        kernel=kernel,
        ulysses=group,
        tensor_parallel=TensorParallel(group=None, sequence_parallel=False),
        table=turn,
        causal=True,
        documents=None,
    )  # fmt: skip
    return head_chunked_attention(x, block)


def measure(case: Case, device: torch.device, seconds: float) -> Found:
    """Return medians over as many runs as the seconds allow; a case without memory says so."""
    try:
        leaves = [leaf.requires_grad_() for leaf in case.make()]
        peak = _peak_bytes(case, leaves, device)
        end = time.perf_counter() + seconds
        times = [_times(case, leaves, device) for _ in range(2)]
        while time.perf_counter() < end:
            times.append(_times(case, leaves, device))
    except torch.OutOfMemoryError:
        return Found(reason="out of memory")
    finally:
        leaves = []
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
    return Found(forward=forward, backward=backward, peak_bytes=peak)


def _peak_bytes(case: Case, leaves: list[Tensor], device: torch.device) -> int:
    """Run once, which warms up, and return the most bytes held, the inputs among them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _times(case, leaves, device)
        return torch.cuda.max_memory_allocated()
    with ByteCounter() as ledger:
        _times(case, [leaf.detach().clone().requires_grad_() for leaf in leaves], device)
    return ledger.peak_bytes


def _times(case: Case, leaves: list[Tensor], device: torch.device) -> tuple[float, float]:
    """Run once, and return seconds of forward and backward."""
    clock = _Clock(device)
    clock.mark()
    out = case.attend(*leaves)
    clock.mark()
    grad_out = torch.ones_like(out)
    clock.mark()
    torch.autograd.grad(out, leaves, grad_out)
    clock.mark()
    forward, _, backward = clock.seconds()
    return forward, backward


class _Clock:
    """The device's own clock: on CUDA a mark is a moment of its stream, not of the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.on_cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between neighbouring marks, when the device has passed the last."""
        if self.on_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.marks)]
        return [b - a for a, b in pairwise(self.marks)]


HEAD = [
    "kernel", "block", "forward ms", "backward ms", "forward TFLOP/s", "backward TFLOP/s",
    "rate of bare", "peak GiB",
]  # fmt: skip


def section(shape: Shape, kernels: list[AttentionKernel], seconds: float) -> str:
    """Measure one length, and return its table."""
    rows = []
    with loopback(shape.ranks) as group:
        for kernel in kernels:
            bare = Found()
            for case in cases(shape, kernel, group, from_x=kernel is kernels[0]):
                found = measure(case, shape.device, seconds)
                if case.name == "bare kernel":
                    bare = found
                rows.append([kernel.name, case.name, *_figures(shape, found, bare)])
    return f"## {shape.seq:,} tokens\n\n{table(HEAD, rows)}"


def _figures(shape: Shape, found: Found, bare: Found) -> list[str]:
    if found.reason:
        return [found.reason, *["-"] * 5]
    rate = bare.both / found.both
    missed = " (below)" if rate < LEAST_RATE and shape.seq >= FROM_LENGTH else ""
    return [
        milliseconds(found.forward),
        milliseconds(found.backward),
        f"{shape.forward_flops / found.forward / 1e12:.2f}",
        f"{2.5 * shape.forward_flops / found.backward / 1e12:.2f}",
        f"{rate:.3f}{missed}",
        f"{found.peak_bytes / 2**30:.3f}",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_on_gpu",
        description="What one rank of an all-to-all computes, against the bare kernel.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--ranks", type=int, default=8, help="C, of which this process is one")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=4096, help="width of x")
    parser.add_argument("--kernels", nargs="+", choices=sorted(KERNELS), help="by default all here")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed runs for each case")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has none; take --device cpu --dtype float32")
    if not fits_ulysses(given.heads, given.kv_heads, given.ranks):
        parser.error(
            f"--ranks {given.ranks} cannot share --heads {given.heads} and --kv-heads "
            f"{given.kv_heads}; it divides the heads, and the KV heads or they it"
        )
    uneven = [seq for seq in given.lengths if seq % (2 * given.ranks)]
    if uneven:
        parser.error(f"--lengths {uneven[0]} is not divisible by 2 x ranks = {2 * given.ranks}")
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    given = _arguments()
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    names = given.kernels or [
        name
        for name, kernel in KERNELS.items()
        if kernel.refusal(device, dtype, given.head_dim) is None
    ]
    kernels = [kernel_for(device, dtype, given.head_dim, name) for name in names]
    torch.manual_seed(0)
    sections = [
        f"Rank 0 of {given.ranks}, {given.heads} heads and {given.kv_heads} KV heads of "
        f"{given.head_dim}, width {given.hidden}, {name_of(dtype)} on {device.type}, causal. The "
        f"claim is a rate of {LEAST_RATE} of the bare kernel's or better, forward and backward "
        f"together, from {FROM_LENGTH // K}K tokens up."
    ]
    for seq in given.lengths:
        shape = Shape(
            seq=seq,
            ranks=given.ranks,
            heads=given.heads,
            kv_heads=given.kv_heads,
            head_dim=given.head_dim,
            hidden=given.hidden,
            dtype=dtype,
            device=device,
        )
        sections.append(section(shape, kernels, given.seconds))
    text = page(
        "Attention of one rank on a GPU",
        facts(["flash-attn", "transformer-engine"]),
        sections,
    )
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
