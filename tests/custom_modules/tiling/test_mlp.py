# SPDX-License-Identifier: Apache-2.0
"""Tiles of any function of single tokens, and Megatron's MLPs among them, against the whole."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from custom_modules.gpt.model import LongContextGPT
from custom_modules.gpt.norm import RMSNorm
from custom_modules.memory.config import Recompute, Tiling
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.rope.config import RopeScaling
from custom_modules.tiling.mlp import TokenFunction, tiled
from tests.custom_modules.support import llamas
from tests.ranks import megatron_backend, run_ranks

MLPS: dict[str, dict[str, Any]] = {
    "SwiGLU with bias": {"add_bias_linear": True},
    "GELU": {"gated_linear_unit": False, "activation_func": nn.functional.gelu},
    "GELU with bias and dropout": {
        "gated_linear_unit": False,
        "activation_func": nn.functional.gelu,
        "add_bias_linear": True,
        "hidden_dropout": 0.3,
    },
}


def token_function(module: nn.Module) -> TokenFunction:
    return TokenFunction(run=module, parameters=tuple(module.parameters()), ends_layer=False)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)).to(dtype)


def gradients(module: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype))
    found = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    return found


@pytest.mark.parametrize("tile", [1, 3, 7, 24, 33, 10**9])
@pytest.mark.parametrize("shape", [(11, 3, 6), (1, 1, 6), (5, 2, 3, 6)], ids=str)
def test_tiles_of_any_size_equal_the_whole(shape, tile):
    module, x = mlp(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    whole = module(x)
    ours = tiled(x, token_function(module), tile=tile)
    torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)
    for mine, theirs in zip(gradients(module, x, ours), gradients(module, x, whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_frozen_parameter_gets_no_gradient():
    module, x = mlp(), torch.randn(4, 1, 6, dtype=torch.float64, requires_grad=True)
    module[0].weight.requires_grad_(False)
    tiled(x, token_function(module), tile=2).sum().backward()
    assert module[0].weight.grad is None
    assert module[2].weight.grad is not None


def test_tiles_of_bf16_are_added_in_fp32():
    module = nn.Linear(6, 6, bias=False).bfloat16()
    x = torch.randn(512, 1, 6).bfloat16()
    tiled(x, token_function(module), tile=1).sum().backward()
    exact = x.double().sum((0, 1)).expand(6, 6)
    torch.testing.assert_close(module.weight.grad.double(), exact, rtol=2**-8, atol=1e-3)


def test_a_tile_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="tile is 0 tokens; it must be at least 1"):
        tiled(torch.ones(2, 1, 6), token_function(mlp()), tile=0)


class FusedLinear(torch.autograd.Function):
    """A product that adds its weight's gradient to `main_grad`, as Megatron's fused one does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.flatten(0, 1).t() @ x.flatten(0, 1))
        ctx.weight.grad_added_to_main_grad = True
        return grad @ ctx.weight, torch.full_like(ctx.weight, torch.nan)  # a dummy nobody may read


def test_a_fused_accumulation_serves_tile_by_tile_and_its_dummy_is_not_added():
    weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    norm = nn.LayerNorm(6).double()

    def run(tile):
        return FusedLinear.apply(norm(tile), weight)

    function = TokenFunction(run=run, parameters=(weight, *norm.parameters()), ends_layer=False)
    x = torch.randn(7, 2, 6, dtype=torch.float64)
    for _ in range(2):  # two micro-batches: the flag is still set from the first
        tiled(x.requires_grad_(), function, tile=4).sum().backward()
        assert weight.grad is not None  # the hook that waits for it fires
        assert weight.grad_added_to_main_grad
        weight.grad = None
    exact = norm(x).flatten(0, 1).sum(0).expand(6, 6).detach()
    torch.testing.assert_close(weight.main_grad, 2 * exact, rtol=0, atol=1e-12)
    of_norm = torch.autograd.grad((norm(x) @ weight.t()).sum(), norm.weight)[0]
    torch.testing.assert_close(norm.weight.grad, 2 * of_norm, rtol=0, atol=1e-12)


def peak(run: Any) -> int:
    with ByteCounter() as ledger:
        run()
    return ledger.peak_bytes


def test_bytes_of_a_tile_and_not_of_the_sequence():
    module = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))
    x = torch.randn(8192, 1, 16, requires_grad=True)

    def extra(forward: Any) -> int:
        """What is held beyond output, its gradient and dx."""
        return peak(lambda: forward(x).backward(torch.ones_like(x))) - 3 * x.nbytes

    function = token_function(module)
    assert extra(lambda t: tiled(t, function, tile=64)) < extra(module) / 30


@pytest.mark.usefixtures("megatron_rank")
def test_a_norm_keeps_its_input_alone():
    norm = RMSNorm(llamas.configuration(torch.float32), 64)
    x = torch.randn(8192, 1, 64, requires_grad=True)
    assert peak(lambda: norm(x)) < 1.3 * x.nbytes  # its output, and a tile's buffers


def model(config: dict[str, Any], memory: dict[str, Any]) -> LongContextGPT:
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    return LongContextGPT(
        llamas.configuration(torch.float64, **config),
        rope=RopeScaling.base_change(10_000),
        vocab_size=llamas.VOCAB,
        max_sequence_length=64,
        **memory,
    ).train()


def deviations(length: int) -> dict[str, float]:
    """Return how far each tiled MLP is from the plain one, losses and gradients."""
    found = {}
    memories = {
        "": {"tiling": Tiling(mlp=True, mlp_tile=5)},
        " recomputed": {
            "tiling": Tiling(mlp=True, mlp_tile=5),
            "recompute": Recompute(kind="kept_attention"),
        },
    }
    for name, config in MLPS.items():
        plain = model(config, {})
        for how, memory in memories.items():
            ours = model(config, memory)
            ours.load_state_dict(plain.state_dict())
            results = []
            for one in (ours, plain):
                model_parallel_cuda_manual_seed(7)
                one.zero_grad()
                tokens = torch.arange(2 * length).view(2, length) % llamas.VOCAB
                loss = one(tokens, tokens % length, None, labels=tokens)
                loss.sum().backward()
                results.append([loss, *(p.grad for p in one.parameters())])
            found[name + how] = max(
                float((a - b).abs().max()) for a, b in zip(*results, strict=True)
            )
    return found


def with_two_tensor_ranks() -> dict[str, float]:
    with megatron_backend():
        parallel_state.initialize_model_parallel(2)
        return deviations(26)


@pytest.mark.usefixtures("megatron_rank")
def test_any_mlp_of_megatron_in_tiles_equals_the_whole():
    found = deviations(13)
    assert max(found.values()) < 1e-10, found


@pytest.mark.parity
def test_any_mlp_in_tiles_equals_the_whole_under_sequence_parallelism():
    for found in run_ranks(with_two_tensor_ranks, 2):
        assert max(found.values()) < 1e-10, found
