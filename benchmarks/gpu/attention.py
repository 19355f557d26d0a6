# SPDX-License-Identifier: Apache-2.0
"""The attention of one rank of an all-to-all, compared with its bare kernel.

One process takes the place of rank 0 of C ranks: H heads and G KV heads over S tokens are, on a
rank, S / C tokens of all heads before the exchange and all S tokens of H / C heads after it. The
exchange is a copy of the same size within the device (`benchmarks.harness.loopback`), so what is
measured is everything of the block but the link. Per length and kernel:

* the bare kernel: H / C query heads over S tokens, laid out as the exchange leaves them;
* Ulysses from q, k, v: what its packing, copies and saving add to that kernel;
* with the kernel that `auto` takes: the products of the projection alone, Ulysses from x, and per U
  head-chunked attention from x. The bare time of these blocks is that of the kernel and of the
  products.

FLOPs are 4 S^2 D / 2 for each head of the rank forward, and 2.5 times as many backward: the
projection is not counted. A block runs once to warm up; then two to five forwards, and as many
forwards with backward, are queued between two marks of the device's clock, as the layers of a step
are. `host` is what the host needs to queue a forward and a backward: where it is the longer one, a
step with nothing else to queue waits for it. Times are medians over rounds, in which blocks take
turns. Peak bytes are the allocator's on CUDA, of x or q, k, v on; on CPU those of
`custom_modules.profiling.byte_counter`.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.cases import BARE, PRODUCTS
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.loopback import loopback
from benchmarks.harness.machine import version
from benchmarks.harness.out_of_memory import out_of_memory
from benchmarks.harness.rounds import in_turns
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
from recipes.spec.units import K

IN_A_ROW = (2, 5)
"""Fewest and most blocks that are queued at once: most where the host counts, at `SHORT` tokens."""
SHORT = 32 * K
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
class Block:
    """Its inputs, made anew, and what leads from them to an output."""

    kernel: str
    name: str
    make: Callable[[], Leaves]
    attend: Callable[..., Tensor]
    tokens: int
    """Of all ranks."""
    with_products: bool = False
    """Whether the projection is in it."""


@dataclass(slots=True)
class Found:
    """Seconds of forward, backward and host by round, and the most bytes held."""

    kernel: str
    block: str
    with_products: bool
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    reason: str = ""
    """Why it could not run."""


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


def blocks(
    shape: Shape, kernel: AttentionKernel, group: dist.ProcessGroup, *, from_x: bool
) -> Iterator[Block]:
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

    yield Block(
        kernel=kernel.name,
        tokens=shape.seq,
        name=BARE,
        make=partial(qkv, shape.seq, share, kv_share),
        attend=lambda *leaves: _Bare.apply(*leaves, kernel),
    )
    yield Block(
        kernel=kernel.name,
        tokens=shape.seq,
        name="ulysses",
        make=partial(qkv, tokens, shape.heads, shape.kv_heads),
        attend=ulysses,
    )
    if not from_x:
        return
    turn = _table(shape, tokens)
    yield Block(
        kernel=kernel.name,
        tokens=shape.seq,
        name=PRODUCTS,
        make=x_and_weight,
        attend=torch.nn.functional.linear,
    )
    yield Block(
        kernel=kernel.name,
        tokens=shape.seq,
        name="ulysses from x",
        with_products=True,
        make=x_and_weight,
        attend=partial(_projected, shape, ulysses, turn),
    )
    for stage in stage_sizes(shape.heads, shape.kv_heads, shape.ranks):
        yield Block(
            kernel=kernel.name,
            tokens=shape.seq,
            with_products=True,
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


def in_turn(given: Sequence[Block], device: torch.device, rounds: int) -> list[Found]:
    """Run blocks in turn; the first of a round is the last of the next."""
    found = [
        Found(kernel=one.kernel, block=one.name, with_products=one.with_products) for one in given
    ]
    pairs = list(zip(given, found, strict=True))
    for block, one in pairs:
        try:
            one.peak_bytes = _peak_bytes(block, device)
        except torch.OutOfMemoryError as raised:
            one.reason = out_of_memory(raised)
        _free(device)
    able = [pair for pair in pairs if not pair[1].reason]
    for block, one in in_turns(able, rounds):
        forward, both, host = _times(block, device)
        one.forward.append(forward)
        one.backward.append(both - forward)
        one.host.append(host)
        _free(device)
    return found


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _peak_bytes(block: Block, device: torch.device) -> int:
    """Run once, which warms up, and return the most bytes held, the inputs among them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _both(block, _leaves(block))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with ByteCounter() as ledger:
        _both(block, [leaf.detach().clone().requires_grad_() for leaf in _leaves(block)])
    return ledger.peak_bytes


def _leaves(block: Block) -> list[Tensor]:
    return [leaf.requires_grad_() for leaf in block.make()]


def _both(block: Block, leaves: list[Tensor]) -> None:
    out = block.attend(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def _times(block: Block, device: torch.device) -> tuple[float, float, float]:
    """Return seconds of a forward, of forward and backward, and of the host for both."""
    leaves = _leaves(block)
    fewest, most = IN_A_ROW
    count = min(most, max(fewest, most * SHORT // block.tokens))
    clock = _Clock(device)
    _both(block, leaves)
    clock.mark()
    for _ in range(count):
        block.attend(*leaves)
    clock.mark()
    start = time.perf_counter()
    for _ in range(count):
        _both(block, leaves)
    host = (time.perf_counter() - start) / count
    clock.mark()
    forward, both = clock.seconds()
    return forward / count, both / count, host


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


def attention(sizes: Sizes, *, card: str, length: int) -> dict[str, Any]:
    """Measure kernels and the blocks around them, with the heads of a card, at one length."""
    model, dtype = sizes.card_named(card), getattr(torch, sizes.dtype)
    shape = Shape(
        seq=length, ranks=sizes.attention.ranks, heads=model.heads, kv_heads=model.kv_heads,
        head_dim=model.head_dim, hidden=model.hidden, dtype=dtype,
        device=torch.device(sizes.device),
    )  # fmt: skip
    first = kernel_for(shape.device, dtype, model.head_dim)
    kernels = [
        kernel
        for kernel in KERNELS.values()
        if kernel.name in (sizes.attention.kernels or KERNELS)
        and kernel.refusal(shape.device, dtype, model.head_dim) is None
        and kernel is not first
    ]
    with loopback(shape.ranks) as group:
        given = [
            block
            for kernel in (first, *kernels)
            for block in blocks(shape, kernel, group, from_x=kernel is first)
        ]
        if (peer := _flash_attention_4(shape)) is not None:
            given.append(peer)
        found = in_turn(given, shape.device, sizes.rounds)
    return {
        "tokens": length, "head_dim": model.head_dim, "forward_flops": shape.forward_flops,
        "blocks": [asdict(one) for one in found],
    }  # fmt: skip


def _flash_attention_4(shape: Shape) -> Block | None:
    """Return FlashAttention-4 on the rank's share of heads, where it is installed."""
    if shape.device.type != "cuda" or version("flash-attn-4") is None:
        return None
    function = import_module("flash_attn.cute").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [b, S, h, D]
        out = function(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out

    def make() -> Leaves:
        share, kv_share = shape.heads // shape.ranks, max(1, shape.kv_heads // shape.ranks)
        return tuple(
            shape.drawn(1, shape.seq, n, shape.head_dim) for n in (share, kv_share, kv_share)
        )

    return Block(
        kernel="flash_attn_4", name=BARE, tokens=shape.seq, make=make, attend=attend
    )  # fmt: skip
