# SPDX-License-Identifier: Apache-2.0
"""Our norms, plain and zero-centered, against their formulas in float64."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from custom_modules.gpt.norm import LayerNorm, Norm, RMSNorm, norm_of
from tests.reference.norm import layer_norm, rms_norm

WIDTH, EPS = 24, 1e-2
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-13),
        (torch.float32, 2e-6),
        (torch.bfloat16, 2**-8),  # the rounding of the result: inside is fp32
    ],
    ids=str,
)
KINDS = pytest.mark.parametrize("kind", [RMSNorm, LayerNorm], ids=lambda kind: kind.__name__)
CENTERED = pytest.mark.parametrize("centered", [False, True], ids=["plain", "zero-centered"])
SHAPES = pytest.mark.parametrize(
    "shape", [(5, 3), (1030, 2), (4, 2, 3), (7,)], ids=["short", "two tiles", "heads", "flat"]
)


def config(dtype: torch.dtype, centered: bool = False, **other: object) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        params_dtype=dtype,
        layernorm_zero_centered_gamma=centered,
        **other,
    )


def formula(norm: Norm, leaves: list[Tensor]) -> Tensor:
    t, weight, *bias = leaves
    weight = weight + 1 if norm.zero_centered else weight
    return layer_norm(t, weight, *bias, eps=EPS) if bias else rms_norm(t, weight, eps=EPS)


@KINDS
@CENTERED
@SHAPES
@DTYPES
def test_a_norm_and_its_gradients_are_those_of_the_formula(kind, centered, shape, dtype, tolerance):
    draw = torch.Generator().manual_seed(0)
    norm = kind(config(dtype, centered), WIDTH, eps=EPS)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, generator=draw)
    t, grad_out = (
        torch.randn(*shape, WIDTH, generator=draw, dtype=torch.float64).to(dtype) for _ in "tg"
    )
    leaves = [t.requires_grad_(), *norm.parameters()]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, right = norm(t), formula(norm, doubles)
    assert out.dtype == dtype
    mine = (out, *torch.autograd.grad(out, leaves, grad_out))
    expected = (right, *torch.autograd.grad(right, doubles, grad_out.double()))
    for tensor, of_formula in zip(mine, expected, strict=True):
        assert (tensor - of_formula).abs().max() < tolerance * of_formula.abs().max()


def wide_output(norm: Norm, t: Tensor) -> Tensor:
    out = torch.empty_like(t, dtype=torch.float32)
    norm.write(out, t.float(), *norm.wide(torch.float32, *norm.parameters()))
    return out


@KINDS
@CENTERED
def test_a_new_norm_scales_by_one(kind, centered):
    norm = kind(config(torch.float64, centered), WIDTH, eps=0.0)
    out = norm(torch.randn(3, 2, WIDTH, dtype=torch.float64) + 1)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(3, 2, dtype=torch.float64))


def test_a_zero_centered_layer_norm_is_nemotrons():
    draw = torch.Generator().manual_seed(0)
    theirs = NemotronLayerNorm1P(WIDTH, eps=EPS).double()
    ours = LayerNorm(config(torch.float64, centered=True), WIDTH, eps=EPS)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, generator=draw)
    ours.load_state_dict(theirs.state_dict())
    t = torch.randn(4, 2, WIDTH, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(ours(t), theirs(t), rtol=1e-14, atol=1e-14)


def test_a_small_zero_centered_weight_counts_in_bfloat16():
    norm = LayerNorm(config(torch.bfloat16, centered=True), WIDTH)
    small = 2**-9  # 1 + 2^-9 rounds to 1 in bf16
    torch.nn.init.constant_(norm.weight, small)
    row = torch.zeros(1, 1, WIDTH, dtype=torch.bfloat16)
    row[..., 0], row[..., 1] = 1.0, -1.0
    plain = LayerNorm(config(torch.bfloat16), WIDTH)
    difference = wide_output(norm, row) / wide_output(plain, row)
    torch.testing.assert_close(difference[0, 0, 0].item(), 1 + small, rtol=1e-6, atol=0)


@KINDS
@pytest.mark.parametrize("parallel", [False, True])
def test_every_parameter_says_whether_tokens_are_sharded_over_tensor_ranks(kind, parallel):
    tp = 2 if parallel else 1
    made = config(torch.float32, tensor_model_parallel_size=tp, sequence_parallel=parallel)
    for parameter in kind(made, WIDTH).parameters():
        assert parameter.sequence_parallel is parallel


def test_a_norm_that_is_not_here_is_refused():
    with pytest.raises(ValueError, match=r"normalization is 'L2Norm'; .* RMSNorm or LayerNorm"):
        norm_of(config(torch.float32, normalization="L2Norm"))


@KINDS
def test_no_tokens_have_no_norms_and_one_vector_is_refused(kind):
    norm = kind(config(torch.float32), WIDTH, eps=EPS)
    for shape in ((0, 2), (3, 0)):
        t = torch.zeros(*shape, WIDTH, requires_grad=True)
        out = norm(t)
        out.sum().backward()
        assert out.shape == t.grad.shape == t.shape
        assert not any(p.grad.any() for p in norm.parameters())
    with pytest.raises(ValueError, match="norm of \\[24\\]; it needs tokens"):
        norm(torch.zeros(WIDTH))
