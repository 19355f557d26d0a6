# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from custom_modules.attention_kernels import CPU_FLASH, attention, kernel_for
from tests.reference import attention as reference

HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 2), (4, 1)], ids=str)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
# Inputs, q k^T, weights and outputs are each rounded to 8 bits: a few of 2^-8, relative to the
# largest value of the tensor, since the rounding of a sum is that of its terms.
BF16_TOLERANCE = 2**-6
FP32_TOLERANCE = 1e-5  # the same with 24 bits, and sums of up to 1,024 terms


def made_up(
    heads: int, kv_heads: int, length: int, *, head_dim: int = 16, batch: int = 3
) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output, float64."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, n, length, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def results(tensors: list[torch.Tensor], *, causal: bool) -> list[torch.Tensor]:
    """Return our output and the gradients of q, k and v."""
    *inputs, grad_out = tensors
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attention(*leaves, causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def assert_equals_reference(tensors: list[torch.Tensor], *, causal: bool, tolerance: float) -> None:
    """Compare output and all gradients, relative to the largest value of each, or to 1."""
    expected = reference.attention_with_gradients(*(t.cpu() for t in tensors), causal=causal)
    for name, ours, right in zip(
        ("out", "dq", "dk", "dv"), results(tensors, causal=causal), expected, strict=True
    ):
        assert ours.dtype == tensors[0].dtype
        error = (ours.cpu().double() - right).abs().max() / right.abs().max().clamp(min=1)
        assert error < tolerance, f"{name} differs by {error:.1e} of its largest value"


@HEADS
@CAUSAL
@pytest.mark.parametrize("length", [1, 7, 64])
def test_attention_and_its_gradients_are_those_of_the_formula(heads, kv_heads, length, causal):
    tensors = made_up(heads, kv_heads, length)
    assert_equals_reference(tensors, causal=causal, tolerance=1e-10)


@CAUSAL
def test_a_length_beyond_one_block_of_the_kernel_is_the_formula_too(causal):
    tensors = made_up(2, 1, 777, batch=1)
    assert_equals_reference(tensors, causal=causal, tolerance=1e-10)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, FP32_TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)],
    ids=str,
)
@HEADS
def test_training_dtypes_stay_within_their_rounding(heads, kv_heads, dtype, tolerance):
    tensors = [t.to(dtype) for t in made_up(heads, kv_heads, 65)]
    assert_equals_reference(tensors, causal=True, tolerance=tolerance)


def test_inputs_may_be_views_of_another_order_of_dimensions():
    tensors = [t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in made_up(6, 2, 7)]
    assert not tensors[0].is_contiguous()
    assert_equals_reference(tensors, causal=True, tolerance=1e-10)


@CAUSAL
@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_the_kernel_returns_the_log_sum_exp_of_the_scores(dtype, lse_dtype, causal):
    q, k, v, _ = (t.to(dtype) for t in made_up(4, 4, 7))
    _, lse = CPU_FLASH.forward(q, k, v, causal)
    assert lse.dtype == lse_dtype
    _, expected = reference.attention(q.double(), k.double(), v.double(), causal=causal)
    torch.testing.assert_close(
        lse.double(), expected, rtol=0, atol=1e-10 if lse_dtype == torch.float64 else 1e-5
    )


def test_heads_that_kv_heads_do_not_divide_are_refused():
    q, k, v, _ = made_up(6, 4, 7)
    with pytest.raises(ValueError, match=r"6 query heads .* 4 KV heads"):
        attention(q, k, v, causal=True)


def test_a_device_without_a_kernel_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no attention kernel for torch\.float32 on meta"):
        kernel_for(torch.empty(1, device="meta"))


@pytest.mark.gpu
@NEEDS_CUDA
@HEADS
@CAUSAL
@pytest.mark.parametrize("length", [1, 7, 64, 777])
def test_the_cuda_kernel_is_the_formula(heads, kv_heads, length, causal):
    tensors = [t.to("cuda", torch.bfloat16) for t in made_up(heads, kv_heads, length, head_dim=64)]
    assert_equals_reference(tensors, causal=causal, tolerance=BF16_TOLERANCE)


@pytest.mark.gpu
@NEEDS_CUDA
def test_the_cuda_kernel_returns_the_log_sum_exp_of_the_scores():
    q, k, v, _ = (t.to("cuda", torch.bfloat16) for t in made_up(4, 4, 7, head_dim=64))
    _, lse = kernel_for(q).forward(q, k, v, True)
    _, expected = reference.attention(*(t.cpu().double() for t in (q, k, v)), causal=True)
    assert lse.shape == expected.shape
    torch.testing.assert_close(lse.cpu().double(), expected, rtol=0, atol=1e-2)


@pytest.mark.gpu
@NEEDS_CUDA
def test_float64_on_cuda_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no attention kernel for torch\.float64 on cuda"):
        kernel_for(torch.empty(1, device="cuda", dtype=torch.float64))
