# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's transformer layer with this package's recompute, host offload and tiled MLP.

The layer keeps Megatron's modules, names and sharded state; only the way it runs changes. In
training, by `Recompute.of_layer`, its forward is called through `custom_modules.memory.recompute`,
and the tensors that it keeps may go to the host; the MLP with the norm before it is called through
`custom_modules.tiling.mlp`. With neither, the layer runs as Megatron's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from megatron.core.tensor_parallel.random import _fork_rng, _get_all_rng_states, _set_all_rng_states
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from custom_modules.gpt import fp8_recompute
from custom_modules.gpt.megatron_releases import require_unset
from custom_modules.gpt.moe_router import mark_experts, weigh_by_tokens
from custom_modules.memory.config import Recompute, Tiling
from custom_modules.memory.host_offload import HostOffload
from custom_modules.memory.recompute import Checkpoint, DeviceStore, recomputed
from custom_modules.tiling.mlp import TokenFunction, tiled


class LongContextLayer(TransformerLayer):
    """A layer [s, b, hidden] to [s, b, hidden] that keeps little for its backward."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        *,
        recompute: Recompute,
        tiling: Tiling,
        offload: HostOffload | None = None,
        **megatron: Any,
    ) -> None:
        """Take Megatron-Core's arguments of a layer, and this package's by name.

        `offload` is that of the pipeline stage. Raises ValueError if Megatron-Core's own recompute
        is requested as well.
        """
        super().__init__(config, submodules, layer_number, **megatron)
        if isinstance(self.mlp, MoELayer):
            weigh_by_tokens(self.mlp, self.pg_collection)
            if getattr(config, "experts_apart", True):
                mark_experts(self.mlp)
        self.kind = recompute.of_layer(self.layer_number)
        self.mlp_tile = tiling.mlp_tile if tiling.mlp else None
        self.offload = offload
        refuse_both(config, recompute, tiling)
        self._checkpoint = Checkpoint(
            keep_attention=self.kind == "kept_attention",
            keeping=partial(offload.keeping, self.layer_number) if offload else DeviceStore,
            first=partial(fp8_recompute.first_run, config),
            second=self._second_run,
        )

    def forward(self, hidden_states: Tensor, **megatron: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [s, b, hidden] and the context, which it does not change."""
        takes_gradient = hidden_states.requires_grad or any(
            parameter.requires_grad for parameter in self.parameters()
        )
        if self.kind == "none" or not self.training or not takes_gradient:
            return super().forward(hidden_states=hidden_states, **megatron)
        megatron.pop("dynamic_inference_decode_only", None)

        def attention(x: Tensor) -> Tensor:
            out: Tensor = self._forward_attention(hidden_states=x, **megatron)[0]
            return out

        out = recomputed(hidden_states, attention, self._checkpoint, rest=self._forward_mlp)
        return out, megatron.get("context")

    def _forward_mlp(
        self, hidden_states: Tensor, inference_context: Any = None, **later: Any
    ) -> Tensor:
        require_unset(later, but="packed_seq_params")
        if self.mlp_tile is None:
            return super()._forward_mlp(hidden_states, inference_context)
        function = TokenFunction(
            run=self._norm_and_mlp,
            parameters=(*self.pre_mlp_layernorm.parameters(), *self.mlp.parameters()),
            ends_layer=True,
            again=partial(fp8_recompute.again, self.config, self.layer_number),
        )
        out = tiled(hidden_states, function, tile=self.mlp_tile)
        with self.bias_dropout_add_exec_handler():
            out = self.mlp_bda(self.training, self.config.bias_dropout_fusion)(
                (out, None), hidden_states, self.hidden_dropout
            )
        # Pipeline schedules free the output of a stage, which must not be a view.
        return make_viewless_tensor(inp=out, requires_grad=out.requires_grad, keep_graph=True)

    def _norm_and_mlp(self, tile: Tensor) -> Tensor:
        out, bias = self.mlp(self.pre_mlp_layernorm(tile))
        return out if bias is None else out + bias

    def _second_run(self) -> Callable[[], AbstractContextManager[object]]:
        """Save the random states if the layer draws numbers; return the second run's context."""
        states = _get_all_rng_states() if self.hidden_dropout else None

        @contextmanager
        def second() -> Any:
            with fp8_recompute.second_run(self.config, self.layer_number):
                if states is None:
                    yield
                    return
                with _fork_rng():
                    _set_all_rng_states(*states)
                    yield

        return second


def refuse_both(config: TransformerConfig, recompute: Recompute, tiling: Tiling) -> None:
    """Raise ValueError for ways to recompute that exclude each other."""
    theirs = config.recompute_granularity
    ours = recompute.kind in ("full", "kept_attention")
    if ours and theirs is not None:
        raise ValueError(
            f"recompute is {recompute.kind} and Megatron-Core's recompute_granularity {theirs!r}; "
            "a layer is rebuilt once: leave one out"
        )
    if tiling.mlp and theirs == "selective" and "mlp" in (config.recompute_modules or ()):
        raise ValueError(
            "tiling mlp and Megatron-Core's recompute_modules with mlp both rebuild the MLP; "
            "leave one out"
        )
    if tiling.mlp and config.fp8 and config.fp8_recipe == "delayed":
        raise ValueError(
            "tiling mlp with fp8_recipe delayed: its scales come from a whole step's amax, which "
            "tiles would overwrite; take tensorwise, blockwise or mxfp8"
        )
