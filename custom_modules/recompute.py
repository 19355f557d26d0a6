# SPDX-License-Identifier: Apache-2.0
"""Recompute of a layer that never runs attention's forward twice.

    out = layer(x)        and in the backward, again:  out = layer(x), then its gradients

Checkpointing a layer keeps its input and runs its forward a second time in the backward. At long
context nearly all of that second run is attention: with 2 units for its forward and 5 for its
backward, a checkpointed layer costs 2 + 2 + 5 = 9. Attention's backward needs q, k, v, the output
and the log-sum-exp; q, k and v are cheap to rebuild, the output is what the 2 units buy, and it is
no larger than the layer's input. So keep it:

1. the first run, without gradients, computes the layer; attention hands its output and
   log-sum-exp to be kept (`kept`), everything else is freed as it goes;
2. the second run, in the backward, takes them back where attention asks: norm, projection and
   rotation run again, the kernel does not, and autograd's node for attention finds q, k, v, output
   and log-sum-exp saved as after any forward: 2 + 5 = 7 units;
3. what ends the layer and is not needed to rebuild anything may skip its second run altogether
   (`in_second_run`): the tiled MLP, which rebuilds tile by tile in its own backward.

Memory of a layer between the runs, in bytes, e = element size, on a rank with s tokens:

    full             s * b * hidden / TP * e
    kept attention   the same + s * b * h * (D * e + 4)

With an all-to-all the kept output is that of the rank's heads over the whole group's sequence, the
same number of bytes; the second run sends it home again as the first did.

Both are held by a `Keeping`, which may move them to the host meanwhile
(`custom_modules.host_offload`). Composes with TP, CP and PP: communication of norm, projection and
exchange runs twice, as in any checkpoint. What must be the same in both runs (random states, FP8
scales) is remembered and restored by contexts that the adapter gives. The idea is that of
selective checkpointing (arXiv 2205.05198) with the roles swapped.

Limits: re-entrant, so a backward must go through `backward()`, not `grad()`, once; the layer has
one input that takes gradients; its attention goes through `kept`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from custom_modules.causes import cause, retag

Context = Callable[[], AbstractContextManager[object]]


class Keeping(Protocol):
    """Holds what one layer keeps in one forward until its backward takes it."""

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep tensors as they are made: `input` first, then `attention` where it is kept."""

    def finish(self) -> None:
        """Learn that the layer's forward has ended."""

    def take(self) -> dict[str, list[Tensor]]:
        """Return what was added, by name, on the device; nothing is kept afterwards."""


@dataclass
class OnDevice:
    """Keeps everything where it is."""

    tensors: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep them as they are."""
        self.tensors[name] = list(tensors)

    def finish(self) -> None:
        """Do nothing."""

    def take(self) -> dict[str, list[Tensor]]:
        """Return them, and let go of them."""
        taken, self.tensors = self.tensors, {}
        return taken


@dataclass
class _Run:
    """One of the two runs of a layer, as its modules meet it."""

    keeping: Keeping | None
    """The first run: where attention's results go; None where they are not kept."""
    second: bool
    attention: list[Tensor]
    """The second run: what was kept; empty once taken, or where attention computes again."""


_run: ContextVar[_Run | None] = ContextVar("run of a recomputed layer", default=None)


@contextmanager
def _running(run: _Run) -> Iterator[None]:
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def in_second_run() -> bool:
    """Whether a recomputed layer is being rebuilt, so that its output is not read by anyone."""
    run = _run.get()
    return run is not None and run.second


def kept(attention: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what `attention()` returns, from memory where the layer kept it.

    Output and log-sum-exp of any shapes; outside a layer that keeps them, this is a call.
    """
    run = _run.get()
    if run is not None and run.attention:
        taken, run.attention = run.attention, []
        return tuple(taken)
    results = attention()
    if run is not None and run.keeping is not None:
        for tensor in results:
            retag(tensor, "saved inputs")
        run.keeping.add("attention", results)
    return results


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How a layer is run twice."""

    keep_attention: bool
    keeping: Callable[[], Keeping] = OnDevice
    """Called once a forward."""
    first: Context = nullcontext
    """What surrounds the first run."""
    second: Callable[[], Context] = lambda: nullcontext
    """Called before the first run, to remember it; returns what surrounds the second."""


class _Recomputed(torch.autograd.Function):
    """Saves x and, where attention is kept, its output and log-sum-exp, in a `Keeping`."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, layer: Callable[[Tensor], Tensor], how: Checkpoint
    ) -> Tensor:
        ctx.layer = layer
        ctx.second = how.second()
        ctx.keeping = how.keeping()
        retag(x, "saved inputs")
        ctx.keeping.add("input", [x.detach()])
        run = _Run(ctx.keeping if how.keep_attention else None, second=False, attention=[])
        with _running(run), how.first():
            out = layer(x)
        ctx.keeping.finish()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        if ctx.keeping is None:
            raise RuntimeError("a recomputed layer was sent a second gradient; it rebuilds once")
        with cause("saved inputs"):
            taken = ctx.keeping.take()
        ctx.keeping = None
        x = taken["input"][0].detach().requires_grad_()
        run = _Run(None, second=True, attention=taken.get("attention", []))
        del taken
        with torch.enable_grad(), _running(run), ctx.second():
            # Only the edge: the values of the output would be one more [s, b, hidden].
            edge = get_gradient_edge(ctx.layer(x))
        torch.autograd.backward([edge], [grad_out])
        return x.grad, None, None


def recomputed(x: Tensor, layer: Callable[[Tensor], Tensor], how: Checkpoint) -> Tensor:
    """Return `layer(x)`, [s, b, hidden], rebuilt in the backward from what `how` keeps.

    Gradients of the layer's parameters arrive during that backward, once each, as Megatron-Core's
    hooks count on. Without gradients to compute it is a call.
    """
    if not torch.is_grad_enabled():
        return layer(x)
    out: Tensor = _Recomputed.apply(x, layer, how)
    return out
