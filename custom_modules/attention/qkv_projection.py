# SPDX-License-Identifier: Apache-2.0
"""The QKV projection of attention, a few heads at a time, with its gradients written in place.

    q, k, v = split(x W^T + b)

Megatron-Core projects all heads at once. Head-chunked attention takes the rows of some heads, and
in the backward fills those rows of one gradient, so each parameter gets its gradient once.

Legend: s tokens, b sequences, h and g heads and KV heads of this TP rank, D head size, n heads
taken. The weight has Megatron's order: of each KV head its query heads, its key, its value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from custom_modules.dtypes import accumulation_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """The QKV projection of one TP rank, read a few heads at a time.

    `weight` is [(h + 2g) * D, hidden] in Megatron's order: of each KV head its query heads, its
    key, its value. `q_norm` and `k_norm` act on the last dimension of a head.
    """

    weight: Tensor
    bias: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def queries(self, heads: Sequence[int]) -> Tensor:
        """Return the rows, in units of a head, of these query heads."""
        group = self.heads // self.kv_heads
        rows = (n // group * (group + 2) + n % group for n in heads)
        return _index(tuple(rows), self.weight.device)

    def keys(self, heads: slice) -> Tensor:
        """Return the rows of the keys of these KV heads."""
        group = self.heads // self.kv_heads
        rows = (n * (group + 2) + group for n in range(heads.start, heads.stop))
        return _index(tuple(rows), self.weight.device)

    def values(self, heads: slice) -> Tensor:
        """Return the rows of the values of these KV heads."""
        group = self.heads // self.kv_heads
        rows = (n * (group + 2) + group + 1 for n in range(heads.start, heads.stop))
        return _index(tuple(rows), self.weight.device)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return [s, b, n, D] for x [s, b, hidden]."""
        bias = None if self.bias is None else self._by_head(self.bias)[rows].flatten()
        weight = self._by_head(self.weight)[rows].flatten(0, 1)
        return nn.functional.linear(x, weight, bias).unflatten(2, (len(rows), self.head_dim))

    def backward(self, grad: Tensor, x: Tensor, rows: Tensor, into: "Gradients") -> None:
        """Add the gradients of a projection whose output has the gradient `grad`."""
        flat, tokens = grad.flatten(2).flatten(0, 1), x.flatten(0, 1)
        dx = into.x.view(-1, into.x.shape[-1])  # a copy would be lost
        weight = self._by_head(self.weight)[rows].flatten(0, 1)
        dx.addmm_(flat, weight)
        of_rows = (flat.t() @ tokens).unflatten(0, (len(rows), self.head_dim))
        self._by_head(into.weight)[rows] = of_rows
        if into.bias is not None:
            self._by_head(into.bias)[rows] = flat.sum(0).unflatten(0, (len(rows), self.head_dim))

    def parameters(self) -> list[Tensor]:
        """Return the tensors with a gradient, in the order of `Gradients.of_parameters`."""
        own = [self.weight] if self.bias is None else [self.weight, self.bias]
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        return [*own, *(parameter for norm in norms for parameter in norm.parameters())]

    def _by_head(self, t: Tensor) -> Tensor:
        return t.view(-1, self.head_dim, *t.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Gradients of x [s, b, hidden], the projection, and the parameters of the norms.

    Those of x are summed in its dtype, those of the norms in fp32 (float64 for float64).
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    q_norm: list[Tensor]
    k_norm: list[Tensor]

    @classmethod
    def like(cls, x: Tensor, projection: Projection) -> "Gradients":
        """Return gradients to be filled, zero where they are summed."""
        bias = projection.bias
        return cls(
            x=x.new_zeros(x.shape),
            weight=projection.weight.new_empty(projection.weight.shape),
            bias=None if bias is None else bias.new_empty(bias.shape),
            q_norm=_zeros(projection.q_norm),
            k_norm=_zeros(projection.k_norm),
        )

    def of_parameters(self) -> list[Tensor]:
        """Return the gradients of `Projection.parameters`."""
        own = [self.weight] if self.bias is None else [self.weight, self.bias]
        return [*own, *self.q_norm, *self.k_norm]


@cache  # a copy to the device each time would wait for it
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)


def _zeros(norm: nn.Module | None) -> list[Tensor]:
    if norm is None:
        return []
    return [torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) for p in norm.parameters()]
