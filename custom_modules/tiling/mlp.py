# SPDX-License-Identifier: Apache-2.0
"""Functions of single tokens, a tile of the sequence at a time: the MLP with the norm before it.

    out = f(x)    for f with f(x)[t] = f(x[t])        e.g. f(x) = W2 act(W1 norm(x))

An MLP holds s * b * (2 or 4) * F numbers between its two projections, and autograd keeps them: for
a Llama of width 4,096 that is 7 to 14 times its input. Here forward and backward go over tiles of
`tile` tokens: the forward keeps x alone, the backward runs f again on a tile, takes the gradients
of that tile, and adds the gradients of the weights over the tiles. Live at a time:

    x, out or dx, and   tile * (F and what f keeps),  dW of the parameters (twice: sum and tile)

Work: 1 forward, then 1 forward and 1 backward: what a checkpoint of f costs, in matmul units 1 + 1
+ 2. Inside a recomputed layer (`custom_modules.memory.recompute`) a checkpoint of its own would
make that 1 + 1 + 1 + 2. It does not here: when the layer is rebuilt, f is its last part, whose
output is not read, so the second run of the forward is skipped, and its communication with it.
Megatron-Core's own full recompute does not indicate that it rebuilds, so there f runs once more.

Gradients of weights: a tile's gradient is that of the unchanged module, so Megatron's and
Transformer Engine's own accumulation into `main_grad` works if it is on. Otherwise tiles are added
in fp32 (float64 for float64), and the parameter receives the sum once a backward, in its own dtype,
as Megatron's hooks require.

With tensor parallelism the module communicates a tile at a time, the same bytes in more messages:
the tile is of this rank's own tokens, gathered where sequence parallelism shards them. FP8 scales
must not depend on what was computed before, so delayed scaling is refused by the adapter.

Legend: s tokens of this rank, b sequences, h hidden, F inner width. Source: ALST's TiledMLP
(arXiv 2506.13996), which runs one more forward inside checkpointing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from custom_modules.dtypes import accumulation_dtype
from custom_modules.memory.recompute import in_second_run, refuse_autocast
from custom_modules.profiling.categories import Category, category


@dataclass(frozen=True, kw_only=True)
class TokenFunction:
    """A function of single tokens: [n, b, ...] to the same shape."""

    run: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    """All tensors that it reads and that may take gradients."""
    ends_layer: bool
    """Whether its output is added to a residual and read by nothing else in its layer."""
    part: Category | None = "mlp"
    """Cause of its memory; None: that of the caller."""
    again: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which the backward runs it again."""


class SumOverTiles:
    """Gradients of parameters, added up over the tiles in which they are computed."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Begin without sums; parameters that take no gradient get none."""
        self.parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, grads: Sequence[Tensor | None], fused: Sequence[bool]) -> None:
        """Add a tile's gradients; those of `fused` are in `main_grad` already, and only their dummy
        is kept, for the hook that waits for a gradient.
        """
        for place, (grad, in_main_grad) in enumerate(zip(grads, fused, strict=True)):
            if grad is None:
                continue
            total = self.sums[place]
            if in_main_grad or total is None:
                self.sums[place] = grad if in_main_grad else grad.to(accumulation_dtype(grad.dtype))
            else:
                total.add_(grad)

    def taken(self) -> list[Tensor | None]:
        """Return the sums in the dtype of their parameters, and release them."""
        sums, self.sums = self.sums, []
        return [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, self.parameters, strict=True)
        ]


def _category(function: TokenFunction) -> AbstractContextManager[None]:
    return nullcontext() if function.part is None else category(function.part)


def _tiles(tokens: int, rows: int) -> Iterator[slice]:
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def _gradients(
    function: TokenFunction, tile: Tensor, grad_out: Tensor, sums: SumOverTiles
) -> Tensor:
    """Return the gradient of a tile, and add those of the parameters to `sums`."""
    tile = tile.detach().requires_grad_()
    takers = [p for p in function.parameters if p.requires_grad]
    # A fused accumulation sets a flag on the parameter, which stays set from earlier
    # micro-batches.
    before = [getattr(p, "grad_added_to_main_grad", False) for p in takers]
    for parameter, flag in zip(takers, before, strict=True):
        if flag:
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    with torch.enable_grad(), function.again():
        out = function.run(tile)
    dx, *grads = torch.autograd.grad(out, [tile, *takers], grad_out, allow_unused=True)
    fused = [getattr(p, "grad_added_to_main_grad", False) for p in takers]
    for parameter, flag in zip(takers, before, strict=True):
        if flag:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    sums.add(grads, fused)
    return dx


class _Tiled(torch.autograd.Function):
    """Saves x [s, b, h]; takes the parameters so that autograd passes their gradients on."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, function: TokenFunction, rows: int, *parameters: Tensor
    ) -> Tensor:
        ctx.function, ctx.rows = function, rows
        ctx.save_for_backward(x)
        if function.ends_layer and in_second_run():
            return x.new_zeros(()).expand(x.shape)
        out = torch.empty_like(x)
        with _category(function):
            for tile in _tiles(x.shape[0], rows):
                out[tile] = function.run(x[tile])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        function: TokenFunction = ctx.function
        takers = [p for p in function.parameters if p.requires_grad]
        sums = SumOverTiles(takers)
        dx = torch.empty_like(x)
        with _category(function):
            for tile in _tiles(x.shape[0], ctx.rows):
                dx[tile] = _gradients(function, x[tile], grad_out[tile], sums)
            taken = dict(zip(map(id, takers), sums.taken(), strict=True))
        return dx, None, None, *(taken.get(id(p)) for p in function.parameters)


def tiled(x: Tensor, function: TokenFunction, *, tile: int) -> Tensor:
    """Return `function.run(x)`, of the shape of x [s, b, ...], `tile` tokens at a time.

    Tiles are whole rows of b tokens; a tile larger than x is x. Raises ValueError for an empty
    tile.
    """
    if tile < 1:
        raise ValueError(f"tile is {tile} tokens; it must be at least 1")
    refuse_autocast(x)
    rows = max(1, tile // x.shape[1])
    out: Tensor = _Tiled.apply(x, function, rows, *function.parameters)
    return out
