# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel against the formula, and how a kernel is chosen; test_gpu_kernels.py has GPUs'."""

import logging
from dataclasses import replace

import pytest
import torch

from custom_modules.attention.documents import Documents
from custom_modules.attention.registry import CPU_FLASH, KERNELS, kernel_for
from tests.custom_modules.support import zigzag
from tests.reference import attention as reference

HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 2), (4, 1)], ids=str)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
CPU = torch.device("cpu")
DOCUMENTS = [[1, 30, 33], [64], [2, 61, 1]]
# Inputs, q k^T, weights and outputs are each rounded to 8 bits: a few of 2^-8, relative to the
# largest value of the tensor, since the rounding of a sum is that of its terms.
BF16_TOLERANCE = 2**-6
FP32_TOLERANCE = 1e-5  # the same with 24 bits, and sums of up to 1,024 terms


def made_up(
    heads: int, kv_heads: int, length: int, *, head_dim: int = 16, batch: int = 3
) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output, float64."""
    shapes = [(batch, n, length, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return zigzag.made_up(*shapes, seed=length)


def results(
    tensors: list[torch.Tensor], *, causal: bool, documents: list[list[int]] | None = None
) -> list[torch.Tensor]:
    """Return our output and the gradients of q, k and v."""
    q, k, v, grad_out = tensors
    table = None if documents is None else Documents.of(documents)
    out, lse = CPU_FLASH.forward(q, k, v, causal, table)
    return [out, *CPU_FLASH.backward(grad_out, q, k, v, out, lse, causal, table)]


def assert_equals_reference(
    tensors: list[torch.Tensor],
    *,
    causal: bool,
    tolerance: float,
    documents: list[list[int]] | None = None,
) -> None:
    """Compare output and all gradients, relative to the largest value of each, or to 1."""
    expected = reference.attention_with_gradients(*tensors, causal=causal, documents=documents)
    ours = results(tensors, causal=causal, documents=documents)
    for name, mine, right in zip(("out", "dq", "dk", "dv"), ours, expected, strict=True):
        assert mine.dtype == tensors[0].dtype
        assert mine.shape == right.shape, "K and V are not expanded"
        error = (mine.double() - right).abs().max() / right.abs().max().clamp(min=1)
        assert error < tolerance, f"{name} differs by {error:.1e} of its largest value"


@HEADS
@CAUSAL
@pytest.mark.parametrize("length", [1, 7, 64])
def test_attention_and_its_gradients_are_those_of_the_formula(heads, kv_heads, length, causal):
    tensors = made_up(heads, kv_heads, length)
    assert_equals_reference(tensors, causal=causal, tolerance=1e-10)


@HEADS
@CAUSAL
def test_documents_do_not_see_each_other(heads, kv_heads, causal):
    tensors = made_up(heads, kv_heads, 64)
    assert_equals_reference(tensors, causal=causal, tolerance=1e-10, documents=DOCUMENTS)


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
    tensors = [t.to(dtype) for t in made_up(heads, kv_heads, 64)]
    assert_equals_reference(tensors, causal=True, tolerance=tolerance)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_inputs_may_be_views_of_another_order_of_dimensions(documents):
    tensors = [t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in made_up(6, 2, 64)]
    assert not tensors[0].is_contiguous()
    assert_equals_reference(tensors, causal=True, tolerance=1e-10, documents=documents)


@CAUSAL
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize(
    ("dtype", "accumulation_dtype", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-10),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-4),  # its exponential is good to 20 bits, then summed
    ],
    ids=str,
)
def test_the_kernel_returns_the_log_sum_exp_of_the_scores(
    dtype, accumulation_dtype, tolerance, causal, documents
):
    q, k, v, _ = (t.to(dtype) for t in made_up(4, 4, 64))
    table = None if documents is None else Documents.of(documents)
    _, lse = CPU_FLASH.forward(q, k, v, causal, table)
    assert lse.dtype == accumulation_dtype
    _, expected = reference.attention(
        q.double(), k.double(), v.double(), causal=causal, documents=documents
    )
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=tolerance)


@HEADS
def test_gradients_of_parts_of_the_keys_add_up_to_those_of_all(heads, kv_heads):
    q, k, v, grad_out = made_up(heads, kv_heads, 64)
    right = reference.attention_with_gradients(q, k, v, grad_out, causal=False)
    out, lse = CPU_FLASH.forward(q, k, v, False, None)
    parts = [
        CPU_FLASH.backward(grad_out, q, k[:, :, keys], v[:, :, keys], out, lse, False, None)
        for keys in (slice(0, 23), slice(23, 64))
    ]
    (dq, dk, dv), (dq_, dk_, dv_) = parts
    ours = (dq + dq_, torch.cat((dk, dk_), dim=2), torch.cat((dv, dv_), dim=2))
    for mine, expected in zip(ours, right[1:], strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


@HEADS
def test_gradients_of_parts_of_the_queries_add_up_to_those_of_all(heads, kv_heads):
    q, k, v, grad_out = made_up(heads, kv_heads, 64)
    right = reference.attention_with_gradients(q, k, v, grad_out, causal=False)
    out, lse = CPU_FLASH.forward(q, k, v, False, None)
    (dq, dk, dv), (dq_, dk_, dv_) = (
        CPU_FLASH.backward(
            *(t[:, :, of] for t in (grad_out, q)), k, v,
            *(t[:, :, of] for t in (out, lse)), False, None,
        )
        for of in (slice(0, 23), slice(23, 64))
    )  # fmt: skip
    ours = (torch.cat((dq, dq_), dim=2), dk + dk_, dv + dv_)
    for mine, expected in zip(ours, right[1:], strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


@pytest.fixture
def chosen(caplog):
    """Choose anew in this test: the answer is otherwise remembered with its line in the log."""
    kernel_for.cache_clear()
    caplog.set_level(logging.INFO)
    yield kernel_for
    kernel_for.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["auto", "cpu_flash"])
def test_the_cpu_kernel_serves_every_dtype_by_name_and_by_choice(chosen, dtype, name):
    assert chosen(CPU, dtype, 100, name) is CPU_FLASH


def test_of_several_kernels_the_first_is_chosen_and_any_by_name(chosen, monkeypatch):
    other = replace(CPU_FLASH, name="cudnn")
    monkeypatch.setitem(KERNELS, "cudnn", other)
    assert chosen(CPU, torch.float32, 64) is CPU_FLASH
    assert chosen(CPU, torch.float32, 64, "cudnn") is other


def test_documents_take_the_first_kernel_that_packs_them(chosen, monkeypatch):
    packed = replace(CPU_FLASH, name="flash_attn_2", packed=True)
    assert chosen(CPU, torch.float32, 64, documents=True) is CPU_FLASH
    kernel_for.cache_clear()
    monkeypatch.setitem(KERNELS, "flash_attn_2", packed)
    assert chosen(CPU, torch.float32, 64) is CPU_FLASH
    assert chosen(CPU, torch.float32, 64, documents=True) is packed
    assert chosen(CPU, torch.float32, 64, "cpu_flash", documents=True) is CPU_FLASH
    assert {name for name, kernel in KERNELS.items() if kernel.packed} == {
        "flash_attn_2", "flash_attn_3", "cuda_flash"
    }  # fmt: skip


def test_a_choice_is_logged_once_by_its_name(chosen, caplog):
    for _ in range(3):
        chosen(CPU, torch.float32, 64)
    assert caplog.messages == ["attention kernel cpu_flash for float32 on cpu with head size 64"]


def test_an_unknown_name_is_refused_with_those_known(chosen):
    with pytest.raises(ValueError, match="'flash' is unknown; it is one of auto, cpu_flash, fl"):
        chosen(CPU, torch.float32, 64, "flash")


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "cpu_flash"])
def test_a_gpu_kernel_by_name_is_refused_on_cpu_with_what_would_serve(chosen, name):
    with pytest.raises(ValueError, match=f"attention kernel {name} .*there is cpu_flash$"):
        chosen(CPU, torch.bfloat16, 64, name)


def test_a_device_without_a_kernel_is_refused_with_the_reason_of_each(chosen):
    with pytest.raises(ValueError, match=r"no attention kernel for float32 on meta") as refused:
        chosen(torch.device("meta"), torch.float32, 64)
    assert "cpu_flash computes on cpu, not on meta" in str(refused.value)
    assert all(name in str(refused.value) for name in KERNELS)
    with pytest.raises(ValueError, match=r"cpu_flash computes on cpu.* there is none"):
        chosen(torch.device("meta"), torch.float32, 64, "cpu_flash")
