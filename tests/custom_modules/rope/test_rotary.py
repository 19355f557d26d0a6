# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from custom_modules.rope import rotary
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies, rotary_table, rotate, rotate_
from tests.reference import rope as reference


@pytest.mark.parametrize("head_dim", [2, 64])
def test_plain_frequencies_are_powers_of_the_base(head_dim):
    frequencies, temperature = inverse_frequencies(RopeScaling.base_change(10_000), head_dim)
    expected = [10_000 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-15)
    assert temperature == 1.0


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

    monkeypatch.setattr(rotary, "TILE_ELEMENTS", elements)
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


PART = RopeScaling(method="default", base=10_000, partial_rotary_factor=0.5)


@DTYPES
@pytest.mark.parametrize("turn", [rotate, rotate_])
def test_dimensions_beyond_the_rotated_part_pass_through(dtype, turn):
    t, cos, sin = made_up(dtype)
    wide = torch.cat((t, t.flip(0)), dim=-1)
    out = turn(wide.clone(), cos, sin)
    assert torch.equal(out[..., 8:], wide[..., 8:])
    assert torch.equal(out[..., :8], rotate(t, cos, sin))


def test_a_partial_rotation_has_frequencies_of_the_rotated_part():
    frequencies, _ = inverse_frequencies(PART, 16)
    assert torch.equal(frequencies, inverse_frequencies(RopeScaling.base_change(10_000), 8)[0])


def test_the_gradient_of_a_partial_rotation_is_whole():
    t, cos, sin = made_up(torch.float64)
    wide = torch.cat((t, t.flip(0)), dim=-1).requires_grad_()
    grad_out = torch.randn(wide.shape, dtype=torch.float64)
    rotate(wide, cos, sin).backward(grad_out)
    expected = torch.cat((rotate(grad_out[..., :8], cos, -sin), grad_out[..., 8:]), dim=-1)
    assert torch.equal(wide.grad, expected)


@DTYPES
@pytest.mark.parametrize("turn", [rotate, rotate_])
def test_interleaved_pairs_are_half_split_ones_in_another_order(dtype, turn):
    t, cos, sin = made_up(dtype)
    to_interleaved = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    expected = rotate(t, cos, sin)[..., to_interleaved]
    assert torch.equal(turn(t[..., to_interleaved], cos, sin, True), expected)


def test_the_gradient_of_an_interleaved_rotation_turns_back():
    t, cos, sin = made_up(torch.float64)
    grad_out = torch.randn(t.shape, dtype=torch.float64)
    ours = t.clone().requires_grad_()
    rotate(ours, cos, sin, True).backward(grad_out)
    assert torch.equal(ours.grad, rotate(grad_out, cos, -sin, True))


@pytest.mark.parametrize("position", [-1, 2**31])
def test_a_position_that_is_not_rotated_exactly_is_refused(position):
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(10_000), 8)
    with pytest.raises(ValueError, match=f"{position:,}.* from 0 to 2"):
        rotary_table(torch.tensor([[0, position]]), frequencies)
