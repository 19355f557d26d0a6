# SPDX-License-Identifier: Apache-2.0
"""Recompute of a layer that never runs attention's forward twice.

    out = layer(x)        and in the backward, again:  out = layer(x), then its gradients

Checkpointing a layer keeps its input and runs its forward a second time in the backward. At long
context nearly all of that second run is attention: with 2 units for its forward and 5 for its
backward, a checkpointed layer costs 2 + 2 + 5 = 9. Attention's backward needs q, k, v, the output
and the log-sum-exp; q, k and v are cheap to rebuild, the output is what the 2 units buy, and it is
no larger than the layer's input. So keep it:

1. the first run, without gradients, computes the layer; the output and log-sum-exp of attention
   are kept (`reuse_saved_attention`), everything else is freed as it goes;
2. the second run, in the backward, takes them back when it reaches attention: norm, projection and
   rotation run again, the kernel does not, and autograd's node for attention finds q, k, v, output
   and log-sum-exp saved as after any forward: 2 + 5 = 7 units;
3. a function that ends the layer and is not needed to rebuild anything may skip its second run
   (`in_second_run`): the tiled MLP, which rebuilds tile by tile in its own backward.

A layer may be given in two parts, attention with its residual and the `rest`. The backward of the
rest rebuilds both, and leaves the graph of the first part for the first part's own backward: so
the gradient of the layer's output, and all that the rest holds, are gone before attention's
backward begins, which is where the most is held.

Memory of a layer between the runs, in bytes, e = element size, on a rank with s tokens:

    full             s * b * hidden / TP * e
    kept attention   the same + s * b * h * (D * e + 4)

With an all-to-all the kept output is that of the rank's heads over the whole group's sequence, the
same number of bytes; the second run sends it back again as the first did.

Both are held by an `ActivationStore`, which may move them to the host in between
(`custom_modules.memory.host_offload`). Composes with TP, CP and PP: communication of norm,
projection and exchange runs twice, as in any checkpoint. State that must be the same in both runs
(random states, FP8 scales) is saved and restored by contexts of the adapter. The idea is that of
selective checkpointing (arXiv 2205.05198) with the roles swapped.

Limits: re-entrant, so a backward must go through `backward()`, not `grad()`, once; the layer has
one input that takes gradients; its attention goes through `reuse_saved_attention`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from custom_modules.profiling.categories import category, retag

Context = Callable[[], AbstractContextManager[object]]


class ActivationStore(Protocol):
    """Holds the kept tensors of one layer from its forward until its backward takes them."""

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep tensors as they are computed: `input` first, then `attention` if it is kept."""

    def finish(self) -> None:
        """Note that the layer's forward has ended."""

    def take(self, name: str) -> list[Tensor]:
        """Return the tensors added under a name, on the device, and release them."""

    def attention_ended(self) -> None:
        """Note, perhaps twice, that attention's backward, where memory peaks, has ended."""


class DeviceStore:
    """Keeps everything on the device."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._kept: dict[str, list[Tensor]] = {}

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep them as they are."""
        self._kept[name] = list(tensors)

    def finish(self) -> None:
        """Do nothing."""

    def take(self, name: str) -> list[Tensor]:
        """Return them, and release them."""
        return self._kept.pop(name)

    def attention_ended(self) -> None:
        """Do nothing."""


@dataclass
class _Run:
    """One of the two runs of a layer, as its modules see it."""

    keeping: ActivationStore
    keep_attention: bool
    """Whether attention's results go to `keeping` in the first run, and are read back later."""
    second: bool


_run: ContextVar[_Run | None] = ContextVar("run of a recomputed layer", default=None)


@contextmanager
def _running(run: _Run) -> Iterator[None]:
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def in_second_run() -> bool:
    """Whether a recomputed layer is being rebuilt, so that its output is not read."""
    run = _run.get()
    return run is not None and run.second


def reuse_saved_attention(attention: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the result of `attention()`, from memory if the layer kept it.

    Output and log-sum-exp may have any shape; outside a layer that keeps them, this is a call.
    """
    run = _run.get()
    if run is None or not run.keep_attention:
        return attention()
    if run.second:
        with category("saved inputs"):
            return tuple(run.keeping.take("attention"))
    results = attention()
    for tensor in results:
        retag(tensor, "saved inputs")
    run.keeping.add("attention", results)
    return results


def on_attention_backward_done() -> Callable[[], None]:
    """Return the function that attention calls in its backward after its last kernel.

    Attention must ask for it in its forward, where its layer is known.
    """
    run = _run.get()
    return _nothing if run is None or not run.second else run.keeping.attention_ended


def _nothing() -> None:
    """Do nothing: attention outside of a recomputed layer."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Settings of a layer that runs twice."""

    keep_attention: bool
    keeping: Callable[[], ActivationStore] = DeviceStore
    """Called once a forward."""
    first: Context = nullcontext
    """Context of the first run of a part."""
    second: Callable[[], Context] = lambda: nullcontext
    """Called before a part's first run, to save its state; returns the second run's context."""


class _Layer:
    """One layer between its forward and its backward."""

    def __init__(self, how: Checkpoint, parts: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.how, self.parts = how, parts
        self.keeping = how.keeping()
        self.rebuilt = False
        self.second: list[Context] = []
        self.x: Tensor | None = None
        self.edge: GradientEdge | None = None
        """Gradient edge of the first part's output, once it is rebuilt."""

    def run(self, part: int, t: Tensor) -> Tensor:
        """Run a part for the first time."""
        self.second.append(self.how.second())
        with self._running(second=False), self.how.first():
            return self.parts[part](t)

    def rebuild(self) -> Tensor:
        """Return the output of the first part, computed again with its graph."""
        if self.rebuilt:
            raise RuntimeError("a recomputed layer was sent a second gradient; it rebuilds once")
        self.rebuilt = True
        with category("saved inputs"):
            (x,) = self.keeping.take("input")
        self.x = x.detach().requires_grad_()
        with torch.enable_grad(), self._running(second=True), self.second[0]():
            out = self.parts[0](self.x)
        self.edge = get_gradient_edge(out)
        return out.detach()

    def rebuild_rest(self, middle: Tensor) -> GradientEdge:
        """Return the edge where the graph of the rest begins; its output values are not kept."""
        with torch.enable_grad(), self._running(second=True), self.second[1]():
            return get_gradient_edge(self.parts[1](middle))

    def _running(self, *, second: bool) -> AbstractContextManager[None]:
        return _running(_Run(self.keeping, self.how.keep_attention, second))


class _First(torch.autograd.Function):
    """Saves x [s, b, h] and, if attention is kept, its results, in its `ActivationStore`."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: _Layer) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.layer = layer
        retag(x, "saved inputs")
        layer.keeping.add("input", [x.detach()])
        return layer.run(0, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        layer: _Layer = ctx.layer
        if layer.edge is None:
            layer.rebuild()
        edge, layer.edge = layer.edge, None
        assert edge is not None
        torch.autograd.backward([edge], [grad])
        layer.keeping.attention_ended()
        assert layer.x is not None
        of_x, layer.x = layer.x.grad, None
        return of_x, None


class _Rest(torch.autograd.Function):
    """Saves nothing: its input [s, b, h] is the result of the first part's second run."""

    @staticmethod
    def forward(ctx, middle: Tensor, layer: _Layer) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.layer = layer
        return layer.run(1, middle)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        middle = ctx.layer.rebuild().requires_grad_()
        torch.autograd.backward([ctx.layer.rebuild_rest(middle)], [grad])
        return middle.grad, None


def refuse_autocast(x: Tensor) -> None:
    """Raise ValueError inside `torch.autocast`, which would not cover a run in the backward."""
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "torch.autocast is on, and the second run in the backward would compute in other "
            "dtypes than the forward; give the model the dtype it computes in"
        )


def recomputed(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    how: Checkpoint,
    *,
    rest: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `rest(layer(x))`, [s, b, hidden], rebuilt in the backward from the kept tensors.

    `layer` has the attention that may be kept. Gradients of parameters arrive during that backward,
    once each, as Megatron-Core's hooks require. Without gradients to compute it is a plain call. A
    second backward raises RuntimeError.
    """
    parts = [layer] if rest is None else [layer, rest]
    if not torch.is_grad_enabled():
        for part in parts:
            x = part(x)
        return x
    refuse_autocast(x)
    if not x.requires_grad:
        # A frozen embedding: the layer's parameters still have gradients.
        x = x.detach().requires_grad_()
    run = _Layer(how, parts)
    out: Tensor = _First.apply(x, run)
    if rest is not None:
        out = _Rest.apply(out, run)
    run.keeping.finish()
    return out
