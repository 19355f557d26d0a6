# SPDX-License-Identifier: Apache-2.0
"""What runs again when a layer is rebuilt, counted."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.memory.recompute import (
    Checkpoint,
    in_second_run,
    recomputed,
    reuse_saved_attention,
)
from custom_modules.rope.config import RopeScaling
from custom_modules.tiling.mlp import TokenFunction, tiled
from tests.custom_modules.support import llamas

LENGTH = 24


class AttentionUnits(TorchDispatchMode):
    """Counts attention's matrix products by query head, two in a forward, five in a backward."""

    UNITS = MappingProxyType(
        {
            "aten._scaled_dot_product_flash_attention_for_cpu.default": 2,
            "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 5,
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in self.UNITS:
            self.total += self.UNITS[str(func)] * args[0].shape[1]
        return func(*args, **(kwargs or {}))


def step(how: str, memory: dict[str, Any], **config: Any) -> None:
    """Run one forward and backward of the small model."""
    recompute = memory.get("recompute", Recompute())
    model = llamas.ours(
        RopeScaling.base_change(10_000),
        llamas.megatron_weights(llamas.made_up_weights()),
        torch.float32,
        cp=ContextParallelKind(kind=how),
        memory=memory,
        **recompute.megatron_settings(),
        **config,
    )
    model.train()
    tokens = torch.randint(0, llamas.VOCAB, (1, LENGTH))
    model(tokens, torch.arange(LENGTH)[None], None, labels=tokens).sum().backward()


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("how", ["ulysses", "ring", "head_chunked"])
@pytest.mark.parametrize(
    ("recompute", "units"),
    [
        (Recompute(), 7),
        (Recompute(kind="full"), 9),
        (Recompute(kind="kept_attention"), 7),
        (Recompute(kind="uniform"), 9),
        (Recompute(kind="kept_attention", every=2, others="full"), 8),
    ],
    ids=["none", "full", "kept attention", "Megatron's uniform", "every 2nd kept"],
)
def test_attention_units_of_a_layer(how, recompute, units):
    with AttentionUnits() as counted:
        step(how, {"recompute": recompute})
    assert counted.total / (llamas.LAYERS * llamas.HEADS) == units


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products; PyTorch's own counter cannot enter a module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def matmul_flops(run: Any) -> int:
    with Products() as products:
        run()
    return products.flops


def mlp(inner: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, inner), nn.GELU(), nn.Linear(inner, 8)).double()


@pytest.mark.parametrize("recomputed_layer", [False, True], ids=["plain", "recomputed"])
def test_a_tiled_mlp_costs_the_products_of_a_checkpointed_one(recomputed_layer):
    module, x = mlp(32), torch.randn(23, 2, 8, dtype=torch.float64, requires_grad=True)
    function = TokenFunction(run=module, parameters=tuple(module.parameters()), ends_layer=True)

    def layer(t):
        return t + tiled(t, function, tile=6)

    def checkpointed():
        torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True).sum().backward()

    def ours():
        how = Checkpoint(keep_attention=False)
        (recomputed(x, layer, how) if recomputed_layer else layer(x)).sum().backward()

    assert matmul_flops(ours) == matmul_flops(checkpointed) > 0


@pytest.mark.usefixtures("megatron_rank")
def test_tiles_in_a_recomputed_model_add_no_products():
    def run(tiling: Tiling) -> int:
        return matmul_flops(
            lambda: step("ulysses", {"recompute": Recompute(kind="full"), "tiling": tiling})
        )

    assert run(Tiling(mlp=True, mlp_tile=5)) == run(Tiling())


@pytest.mark.usefixtures("megatron_rank")
def test_dropout_is_the_same_in_both_runs():
    def gradients(memory: dict[str, Any]) -> list[torch.Tensor]:
        model = llamas.ours(
            RopeScaling.base_change(10_000),
            llamas.megatron_weights(llamas.made_up_weights()),
            torch.float64,
            cp=ContextParallelKind(kind="ulysses"),
            memory=memory,
            hidden_dropout=0.5,
        ).train()
        torch.manual_seed(3)
        tokens = torch.arange(LENGTH)[None]
        model(tokens, tokens, None, labels=tokens).sum().backward()
        after = torch.rand(1)
        return [*(p.grad for p in model.parameters()), after]

    plain = gradients({})
    memory = {
        "recompute": Recompute(kind="kept_attention"),
        "offload": Offload(tensors="both", cap_gib=1),
    }
    for ours, theirs in zip(gradients(memory), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_what_a_layer_keeps_is_asked_for_once():
    x = torch.ones(2, 1, 3, requires_grad=True)
    asked = []

    def attention():
        asked.append(in_second_run())
        return (x.detach() * 2, x.detach().sum())

    def layer(t):
        out, total = reuse_saved_attention(attention)
        return t * out + total

    recomputed(x, layer, Checkpoint(keep_attention=True)).sum().backward()
    assert asked == [False]
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))
    assert reuse_saved_attention(attention) is not None
    assert asked == [False, False]


@pytest.mark.parametrize("rest", [None, nn.Linear(3, 3)], ids=["one part", "two parts"])
def test_parameters_have_gradients_where_the_input_has_none(rest):
    layer = nn.Linear(3, 3)
    out = recomputed(torch.ones(2, 1, 3), layer, Checkpoint(keep_attention=False), rest=rest)
    out.sum().backward()
    assert layer.weight.grad is not None
    assert rest is None or rest.weight.grad is not None


def test_a_layer_in_inference_keeps_nothing():
    x = torch.ones(2, 1, 3)
    with torch.no_grad():
        out = recomputed(x, lambda t: t * 2, Checkpoint(keep_attention=True))
    assert out.grad_fn is None


def test_autocast_is_refused_where_the_backward_would_be_outside_of_it():
    x = torch.ones(2, 1, 3, requires_grad=True)
    function = TokenFunction(run=torch.square, parameters=(), ends_layer=False)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="autocast is on"):
            recomputed(x, torch.square, Checkpoint(keep_attention=False))
        with pytest.raises(ValueError, match="autocast is on"):
            tiled(x, function, tile=1)


def test_a_second_backward_is_refused():
    x = torch.ones(2, 1, 3, requires_grad=True)
    out = recomputed(x, lambda t: t * t, Checkpoint(keep_attention=False)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second gradient"):
        out.backward()
