# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from custom_modules import rope
from custom_modules.rope import inverse_frequencies, rotary_table, rotate, rotate_
from custom_modules.rope_scaling import RopeScaling
from tests.reference import rope as reference

SCALINGS = {
    "default": RopeScaling.base_change(500_000),
    "yarn 4": RopeScaling.yarn(base=10_000, factor=4.0, original_length=2048),
    "yarn 16": RopeScaling.yarn(base=40_000, factor=16.0, original_length=512),
    "yarn 64 from 8K": RopeScaling.yarn(base=500_000, factor=64.0, original_length=8192),
    "yarn, other betas": RopeScaling(
        method="yarn",
        base=10_000,
        factor=8.0,
        original_length=4096,
        beta_fast=16.0,
        beta_slow=2.0,
    ),
    "yarn, ramp of no width": RopeScaling(
        method="yarn", base=1e30, factor=4.0, original_length=16, beta_fast=4.0, beta_slow=3.9
    ),
    "yarn, temperature off": RopeScaling(
        method="yarn", base=10_000, factor=4.0, original_length=2048, attention_factor=1.0
    ),
    "yarn, temperature stated": RopeScaling(
        method="yarn", base=10_000, factor=4.0, original_length=2048, attention_factor=1.25
    ),
    "llama3 8": RopeScaling.llama3(),
    "llama3 32": RopeScaling.llama3(factor=32.0),
    "llama3, other octaves": RopeScaling(
        method="llama3",
        base=10_000,
        factor=4.0,
        original_length=1024,
        low_freq_factor=2.0,
        high_freq_factor=16.0,
    ),
}


def hugging_face(scaling: RopeScaling, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies and the temperature by which transformers rotates."""
    parameters = {
        "rope_type": scaling.method,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
    }
    if scaling.method == "yarn":
        parameters |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            parameters["attention_factor"] = scaling.attention_factor
    if scaling.method == "llama3":
        parameters["low_freq_factor"] = scaling.low_freq_factor
        parameters["high_freq_factor"] = scaling.high_freq_factor
    config = LlamaConfig(
        head_dim=head_dim,
        rope_theta=scaling.base,
        rope_scaling=None if scaling.method == "default" else parameters,
        max_position_embeddings=int((scaling.original_length or 512) * scaling.factor),
    )
    return ROPE_INIT_FUNCTIONS[scaling.method](config, torch.device("cpu"))


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_and_temperature_are_those_of_hugging_face(scaling, head_dim):
    frequencies, temperature = inverse_frequencies(scaling, head_dim)
    expected, expected_temperature = hugging_face(scaling, head_dim)
    # Hugging Face computes in fp32: a power and four operations, each within 6e-8.
    torch.testing.assert_close(frequencies, expected.double(), rtol=1e-6, atol=0)
    assert temperature == pytest.approx(expected_temperature, rel=1e-15)


@pytest.mark.parametrize("head_dim", [2, 64])
def test_plain_frequencies_are_powers_of_the_base(head_dim):
    frequencies, temperature = inverse_frequencies(RopeScaling.base_change(10_000), head_dim)
    expected = [10_000 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-15)
    assert temperature == 1.0


def test_an_odd_head_size_is_refused():
    with pytest.raises(ValueError, match="head_dim is 33"):
        inverse_frequencies(RopeScaling.base_change(10_000), 33)


@pytest.mark.parametrize("position", [0, 1, 2**22 - 1, 2**22, 2**24 - 1, 2**24 + 1, 2**31 - 1])
def test_a_table_is_exact_at_millions_of_positions(position):
    base, head_dim = 500_000, 64
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(base), head_dim)
    cos, sin = rotary_table(torch.tensor([[position]]), frequencies)
    angles = [reference.exact_angle(position, base, i, head_dim) for i in range(head_dim // 2)]
    # Half a unit in the last place of fp32, and the angle of float64: 2e9 radians to 4e-16 of it.
    tolerance = 2**-25 + position * 4e-16
    assert cos.flatten().tolist() == pytest.approx(list(map(math.cos, angles)), abs=tolerance)
    assert sin.flatten().tolist() == pytest.approx(list(map(math.sin, angles)), abs=tolerance)


def test_a_table_is_fp32_and_has_the_shape_that_rotation_takes():
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(10_000), 8)
    for table in rotary_table(torch.zeros(3, 5, dtype=torch.int64), frequencies):
        assert table.dtype == torch.float32
        assert table.shape == (5, 3, 1, 4)


def test_a_table_follows_position_ids_in_any_order():
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(10_000), 8)
    position_ids = torch.tensor([[0, 1, 6, 7], [2, 0, 1, 0]])
    for table, expected in zip(
        rotary_table(position_ids, frequencies),
        reference.rope_table(position_ids, 10_000, 8),
        strict=True,
    ):
        torch.testing.assert_close(
            table[:, :, 0].transpose(0, 1).double(), expected, rtol=0, atol=2**-24
        )


def test_the_temperature_multiplies_cos_and_sin():
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(10_000), 8)
    position_ids = torch.arange(6)[None]
    for hot, plain in zip(
        rotary_table(position_ids, frequencies, 1.25),
        rotary_table(position_ids, frequencies),
        strict=True,
    ):
        torch.testing.assert_close(hot, 1.25 * plain)


def made_up(dtype: torch.dtype, length: int = 7) -> tuple[torch.Tensor, ...]:
    """Return heads [s, b, h, D] of three sequences and their table, at a temperature."""
    generator = torch.Generator().manual_seed(0)
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(10_000), 8)
    position_ids = torch.randint(0, 5000, (3, length), generator=generator)
    t = torch.randn(length, 3, 2, 8, generator=generator, dtype=torch.float64).to(dtype)
    return t, *rotary_table(position_ids, frequencies, 1.1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-14),
        (torch.float32, 1e-6),
        (torch.bfloat16, 2**-8),  # the rounding of the result and nothing more: inside is fp32
    ],
    ids=str,
)
def test_rotation_is_a_complex_product_in_the_dtype_of_its_input(dtype, tolerance):
    t, cos, sin = made_up(dtype)
    out = rotate(t, cos, sin)
    assert out.dtype == dtype
    expected = reference.rotated(t.double(), cos.double(), sin.double())
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=min(tolerance, 1e-6))


def test_the_gradient_of_rotation_is_that_of_the_formula():
    t, cos, sin = made_up(torch.float64)
    grad_out = torch.randn(t.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, plain = t.clone().requires_grad_(), t.clone().requires_grad_()
    rotate(ours, cos, sin).backward(grad_out)
    reference.rotated(plain, cos.double(), sin.double()).backward(grad_out)
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-14, atol=1e-14)


def test_the_gradient_of_rotation_in_bf16_is_rounded_once():
    t, cos, sin = made_up(torch.bfloat16)
    grad_out = torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours, plain = t.clone().requires_grad_(), t.double().requires_grad_()
    rotate(ours, cos, sin).backward(grad_out)
    reference.rotated(plain, cos.double(), sin.double()).backward(grad_out.double())
    assert ours.grad.dtype == torch.bfloat16
    torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=2**-8, atol=1e-6)


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


@DTYPES
def test_turning_in_place_is_rotation(dtype):
    t, cos, sin = made_up(dtype)
    expected = rotate(t, cos, sin)
    assert not torch.equal(t, expected)
    turned = rotate_(t, cos, sin)
    assert turned is t
    assert torch.equal(t, expected)


def test_turning_in_place_turns_views_and_nothing_else():
    t, cos, sin = made_up(torch.float64)
    wide = torch.cat((t, t), dim=2)
    expected = rotate(t, cos, sin)
    rotate_(wide[:, :, 2:], cos, sin)
    assert torch.equal(wide, torch.cat((t, expected), dim=2))


def test_turning_back_undoes_rotation_at_temperature_1():
    t, _, _ = made_up(torch.float64)
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(10_000), 8)
    cos, sin = rotary_table(torch.arange(7).repeat(3, 1), frequencies)
    turned = rotate_(rotate_(t.clone(), cos, sin), cos, -sin)
    torch.testing.assert_close(turned, t, rtol=0, atol=1e-6)  # cos^2 + sin^2 of fp32


# Of 7 tokens of 3 sequences, 2 heads and 8 dimensions: less than a token, 3 tokens and 1 over, all.
@pytest.mark.parametrize("elements", [1, 3 * 48, 7 * 48 + 5])
@DTYPES
def test_tiles_of_any_size_give_the_same(monkeypatch, dtype, elements):
    t, cos, sin = made_up(dtype)
    grad_out, _, _ = made_up(dtype)
    whole = t.clone().requires_grad_()
    expected = rotate(whole, cos, sin)
    expected.backward(grad_out)
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(10_000), 8)
    positions = torch.arange(21).view(3, 7)
    table = rotary_table(positions, frequencies)

    monkeypatch.setattr(rope, "TILE_ELEMENTS", elements)
    tiled = t.clone().requires_grad_()
    out = rotate(tiled, cos, sin)
    out.backward(grad_out)
    assert torch.equal(out, expected)
    assert torch.equal(tiled.grad, whole.grad)
    assert torch.equal(rotate_(t, cos, sin), expected)
    for ours, right in zip(rotary_table(positions, frequencies), table, strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("turn", [rotate, rotate_])
def test_bf16_is_rounded_once(turn):
    t, cos, sin = made_up(torch.bfloat16)
    in_fp32 = rotate(t.float(), cos, sin)
    assert torch.equal(turn(t, cos, sin), in_fp32.bfloat16())
