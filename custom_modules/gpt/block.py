# SPDX-License-Identifier: Apache-2.0
"""What the layers of a family have besides Llama's: norms elsewhere, a scaled embedding.

    x + post(attention(pre(x))),    then the same with the MLP

| family | pre | post | norm of queries and keys | embedding |
| --- | --- | --- | --- | --- |
| Llama, SmolLM3 | yes | no | none | as it is |
| Qwen 3 | yes | no | each head | as it is |
| Olmo 3 (arXiv 2512.13961) | no | yes | all heads of a token at once | as it is |
| Gemma 3 (arXiv 2503.19786) | yes | yes | each head | times the root of its width |

A norm after attention or MLP is part of its last projection, `NormAfter`, so that everything that
runs, rebuilds or tiles these modules has it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from custom_modules.dtypes import accumulation_dtype
from custom_modules.gpt.megatron_releases import submodules_of
from custom_modules.gpt.norm import RMSNorm, norm_of, tiles
from custom_modules.memory.recompute import refuse_autocast


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Norms of a layer, and the scale of the embedding."""

    pre_norm: bool = True
    """Whether attention and MLP have a norm before them."""
    post_norm: bool = False
    """Whether they have one after them, before the residual is added."""
    wide_qk_norm: bool = False
    """Whether queries and keys are normalised over all heads of a token at once."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of their width, in their dtype."""


LLAMA = Block()


class NormAfter:
    """Mixin of a projection that is followed by a norm of its output [s, b, hidden]."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **megatron: Any
    ) -> None:
        """Take Megatron-Core's arguments of a projection; raise ValueError for one with a bias."""
        if megatron.get("bias"):
            raise ValueError(
                "add_bias_linear is true and a norm follows the projection; Megatron-Core would "
                "add the bias after the norm: set it to false"
            )
        super().__init__(input_size, output_size, config=config, **megatron)  # type: ignore[call-arg]
        self.post_layernorm = norm_of(config)(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the norm of the projection, and no bias."""
        out, _ = super().forward(x)  # type: ignore[misc]
        return self.post_layernorm(out), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the projection's sharded state, and the norm's, which all TP ranks have."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        name, norm = f"{prefix}post_layernorm.", self.post_layernorm.state_dict(keep_vars=True)
        state.update(make_sharded_tensors_for_checkpoint(norm, name, {}, sharded_offsets))
        return state


class RowParallelLinearThenNorm(NormAfter, RowParallelLinear):
    """Megatron-Core's own projection from TP shards, then a norm."""


@cache
def projection_then_norm(*, transformer_engine: bool) -> type[nn.Module]:
    """Return the class of a projection with a norm after it."""
    if not transformer_engine:
        return RowParallelLinearThenNorm
    from megatron.core.extensions.transformer_engine import TERowParallelLinear

    return type("TERowParallelLinearThenNorm", (NormAfter, TERowParallelLinear), {})


class WideNorm(RMSNorm):
    """RMSNorm over all heads of a token, which tensor parallel ranks share.

    out = t / sqrt(mean(t^2) + eps) * w    over the last two dimensions of t [s, b, h, D]

    Each rank has the weights of its own heads. With several ranks they exchange one number a token.
    """

    weight_axes: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int
    ) -> None:
        """Take Megatron-Core's arguments of a norm of heads, and how many all ranks have."""
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()
        super().__init__(config, hidden_size * heads // self.ranks, eps)
        # Its gradient is this rank's alone: summed over TP it would be that of other heads.
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, self.ranks > 1, 0, 1)

    def forward(self, t: Tensor) -> Tensor:
        """Return `t` [s, b, h, D] normalised, in its dtype."""
        flat = t.flatten(2)
        if self.ranks == 1:
            return super().forward(flat).view_as(t)
        refuse_autocast(t)
        out: Tensor = _Shared.apply(flat, self.weight, self)
        return out.view_as(t)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as a shard of all heads'."""
        state = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, self.weight_axes, sharded_offsets
        )
        return found


class _Shared(torch.autograd.Function):
    """`WideNorm` of t [s, b, h * D] over several ranks; saves t and one number a token.

    With n = 1 / sqrt(mean(t^2) + eps) and g the gradient of the output

        dt = n * g * w - t * n^3 * mean(g * w * t)        dw = sum over tokens of n * g * t

    where means are over the heads of all ranks.
    """

    @staticmethod
    def forward(ctx, t: Tensor, weight: Tensor, norm: WideNorm) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.norm, wide = norm, accumulation_dtype(t.dtype)
        squares = torch.linalg.vector_norm(t, dim=-1, keepdim=True, dtype=wide).square_()
        inverse = _mean(squares, norm, t).add_(norm.eps).rsqrt_()
        ctx.save_for_backward(t, weight, inverse)
        (factor,) = norm.wide(wide, weight)
        out = torch.empty_like(t)
        for tile, scale, of_out in tiles(t, inverse, out):
            of_out.copy_((tile.to(wide) * scale).mul_(factor))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        t, weight, inverse = ctx.saved_tensors
        wide = inverse.dtype
        (factor,) = ctx.norm.wide(wide, weight)
        products = torch.empty_like(inverse)
        of_weight = torch.zeros_like(factor)
        for g, tile, scale, product in tiles(grad, t, inverse, products):
            both = g.to(wide) * tile
            product.copy_((both @ factor).unsqueeze(-1))
            of_weight += scale.flatten() @ both.flatten(0, -2)
        slope = _mean(products, ctx.norm, t).mul_(inverse.pow(3))
        dt = torch.empty_like(t)
        for g, tile, scale, sloped, of_dt in tiles(grad, t, inverse, slope, dt):
            straight = (g.to(wide) * factor).mul_(scale)
            of_dt.copy_(straight.sub_(tile.to(wide) * sloped))
        return dt, of_weight.to(weight.dtype), None


def _mean(of_this_rank: Tensor, norm: WideNorm, t: Tensor) -> Tensor:
    """Return sums over this rank's width as means over that of all, in place."""
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_reduce(of_this_rank, group=group)
    return of_this_rank.div_(t.shape[-1] * norm.ranks)


def shape_layer(
    submodules: Any, config: TransformerConfig, block: Block, *, transformer_engine: bool
) -> None:
    """Set the norms of a layer's submodules; raise ValueError for what Megatron cannot take."""
    attention, mlp = submodules.self_attention.submodules, submodules_of(submodules.mlp)
    if (not block.pre_norm or block.post_norm) and config.num_moe_experts:
        raise ValueError("norms after the MLP, or none before it, are not known with experts")
    if not block.pre_norm:
        submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp
        if transformer_engine:  # otherwise the norm is inside the projection
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            attention.linear_qkv = mlp.linear_fc1 = TEColumnParallelLinear
    if block.post_norm:
        then_norm = projection_then_norm(transformer_engine=transformer_engine)
        attention.linear_proj = mlp.linear_fc2 = then_norm
    if block.wide_qk_norm:
        if config.normalization != "RMSNorm" or config.qk_layernorm:
            raise ValueError(
                f"wide_qk_norm is an RMSNorm in place of qk_layernorm; normalization is "
                f"{config.normalization!r} and qk_layernorm {config.qk_layernorm}"
            )
        submodules.self_attention.params["wide_qk_norm"] = True
