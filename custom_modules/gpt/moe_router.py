# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's mixture of experts in a long-context layer, with a layout-independent router.

    out(x) = sum over the k best experts e of  p_e MLP_e(x),   p = softmax(top_k(x W_r))

The layer is Megatron's (`MoELayer`): dropless, its experts run one after the other or grouped by
Transformer Engine. What differs is the weight of the load-balancing loss. With
`calculate_per_token_loss` the step divides all gradients by its tokens, so the auxiliary loss has
to enter times the tokens of the micro-batch. Megatron-Core 0.15 to 0.18 multiplies by those of the
rank: summed over the ranks that share the sequence (tensor ranks by sequence parallelism, and
context ranks), each of which holds its own part of the loss, that is TP x CP times too little.
`TokenWeightedRouter` weighs by the tokens of all of them.

Experts may be divided among ranks (EP) and split over other ranks than the other layers (ETP, arXiv
2504.14960). Megatron-Core gives experts an optimizer of their own only if EP is above 1, and then a
checkpoint of the optimizer could be read only under the same choice. `mark_experts` gives them one
under every layout; it also makes the gradients of experts with ETP but without EP sums over the
ranks that hold the same expert. Megatron FSDP has no groups for experts unless EP is above 1: a
config with `experts_apart` False leaves them unmarked.

Limits, refused by `refuse_experts`: routing is top-k with an auxiliary loss per micro-batch or
without one. Dropped tokens would depend on the layout, jitter would be drawn anew in a recomputed
layer, and the z-loss has the fault above.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import HAVE_TE, MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from custom_modules.gpt.megatron_releases import parameters_of
from custom_modules.memory.config import Tiling

ONLY: dict[str, tuple[Any, ...]] = {
    "fp8": (None, False),
    "moe_expert_capacity_factor": (None,),
    "moe_enable_routing_replay": (False,),
    "moe_input_jitter_eps": (None,),
    "moe_latent_size": (None,),
    "moe_layer_freq": (1,),
    "moe_paged_stash": (False,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_force_biased": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_load_balancing_type": ("aux_loss", "none"),
    "moe_shared_expert_intermediate_size": (None,),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "moe_z_loss_coeff": (None,),
}
"""Fields of Megatron's config and the values that layers with experts support.

Some are not in every release: a config without the field has its first value.
"""


class TokenWeightedRouter(TopKRouter):
    """Megatron's router, with the same weight of the auxiliary loss on any number of ranks."""

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [s, b, experts]; Megatron's own take a kernel of Transformer Engine."""
        if HAVE_TE and input.is_cuda:
            of_megatron: Tensor = super().gating(input)
            return of_megatron
        stated = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = stated.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: torch.distributed.ProcessGroup,
        **later: Any,
    ) -> Tensor:
        """Return `activation` [tokens, experts] with this rank's part of the loss in its graph."""
        stated: bool = self.calculate_per_token_loss  # type: ignore[has-type]
        once = stated and takes_token_count()
        self.calculate_per_token_loss = stated and not once
        try:
            out: Tensor = super().attach_and_log_load_balancing_loss(
                activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, **later
            )
        finally:
            self.calculate_per_token_loss = stated
        if not stated:
            return out
        tokens = activation.shape[0]
        rest = tokens * reduce_group.size() - (1 if once else tokens)
        weighted: Tensor = MoEAuxLossAutoScaler.apply(out, aux_loss * rest)
        return weighted


def takes_token_count() -> bool:
    """Return whether Megatron-Core may weigh the auxiliary loss by more than this rank's tokens.

    From 0.17 on it is told the tokens to count, and 0.19 counts those of all ranks by itself. There
    it is asked for the loss unweighted, and the whole weight is put on here.
    """
    return "valid_token_count" in parameters_of(TopKRouter.attach_and_log_load_balancing_loss)


def weigh_by_tokens(layer: MoELayer, groups: Any) -> None:
    """Give a layer of experts the token-weighted router; it was built with `groups`."""
    router = TokenWeightedRouter(config=layer.config, pg_collection=groups)
    router.set_layer_number(layer.layer_number)
    layer.router = router


def mark_experts(layer: MoELayer) -> None:
    """Mark the parameters of experts for the groups of experts, on any number of ranks."""
    for parameter in layer.experts.parameters():
        parameter.allreduce = False  # Megatron-Core's mark


def refuse_experts(config: TransformerConfig, tiling: Tiling, *, transformer_engine: bool) -> None:
    """Raise ValueError for settings that layers with experts do not support; skip dense models."""
    if not config.num_moe_experts:
        return
    for name, known in ONLY.items():
        value = getattr(config, name, known[0])
        if value not in known:
            values = " or ".join(map(repr, known))
            raise ValueError(f"{name} is {value!r}; layers with experts train with {values}")
    if config.moe_grouped_gemm and not transformer_engine:
        raise ValueError(
            "moe_grouped_gemm is Transformer Engine's, which this model does not use; leave it out"
        )
    if config.recompute_granularity == "selective" and "mlp" in (config.recompute_modules or ()):
        raise ValueError(
            f"recompute_modules with mlp and num_moe_experts {config.num_moe_experts}: "
            "Megatron-Core rebuilds no experts by it; take recompute full or kept_attention"
        )
    if tiling.mlp:
        raise ValueError(
            f"tiling mlp with num_moe_experts {config.num_moe_experts}: the router's auxiliary "
            "loss is of all tokens of a micro-batch, not of a tile; leave one out"
        )
