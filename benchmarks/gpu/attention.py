# SPDX-License-Identifier: Apache-2.0
"""The attention of one rank of an all-to-all, compared with its bare kernel.

One process takes the place of rank 0 of C ranks: H heads and G KV heads over S tokens are, on a
rank, S / C tokens of all heads before the exchange and all S tokens of H / C heads after it. The
exchange is a copy of the same size within the device (`benchmarks.harness.loopback`), so what is
measured is everything of the block but the link. Per length and kernel:

* the bare kernel: H / C query heads over S tokens, laid out as the exchange leaves them;
* Ulysses from q, k, v: what its packing, copies and saving add to that kernel;
* per U, head-chunked attention from x, beside Ulysses from x with the same projection: time, and
  the most bytes allocated. With the first kernel alone, the one that `auto` takes.

FLOPs are 4 S^2 D / 2 for each head of the rank forward, and 2.5 times as many backward: the
projection is not counted. Peak bytes are the allocator's on CUDA, of x or q, k, v on; on CPU those
of `custom_modules.profiling.byte_counter`. A block runs once to warm up, then as often as its
seconds allow, at least twice.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.loopback import loopback
from benchmarks.harness.out_of_memory import out_of_memory
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.qkv_projection import Projection
from custom_modules.attention.registry import KERNELS, kernel_for
from custom_modules.context_parallel.attend import Groups, attend
from custom_modules.context_parallel.config import stage_sizes
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies, rotary_table, rotate
from custom_modules.tensor_parallel import TensorParallel

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

    forward: float = 0.0
    backward: float = 0.0
    peak_bytes: int = 0
    reason: str = ""


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
    except torch.OutOfMemoryError as raised:
        return Found(reason=out_of_memory(raised))
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


def attention(sizes: Sizes, *, length: int) -> dict[str, Any]:
    """Measure every kernel that serves this device, and the blocks around it, at one length."""
    card, dtype = sizes.card, getattr(torch, sizes.dtype)
    shape = Shape(
        seq=length, ranks=sizes.attention.ranks, heads=card.heads, kv_heads=card.kv_heads,
        head_dim=card.head_dim, hidden=card.hidden, dtype=dtype, device=torch.device(sizes.device),
    )  # fmt: skip
    kernels = [
        kernel
        for kernel in KERNELS.values()
        if kernel.refusal(shape.device, dtype, card.head_dim) is None
    ]
    first = kernel_for(shape.device, dtype, card.head_dim)
    kernels.sort(key=lambda kernel: kernel.name != first.name)
    found = []
    with loopback(shape.ranks) as group:
        for kernel in kernels:
            for case in cases(shape, kernel, group, from_x=kernel is kernels[0]):
                measured = measure(case, shape.device, sizes.attention.seconds)
                found.append({"kernel": kernel.name, "block": case.name, **asdict(measured)})
    return {"tokens": length, "forward_flops": shape.forward_flops, "blocks": found}
