# SPDX-License-Identifier: Apache-2.0
import importlib.util
import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch

from custom_modules.attention import pytorch_cuda
from custom_modules.attention.documents import Documents
from custom_modules.attention.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.pytorch_cuda import CUDA_FLASH, CUDNN
from custom_modules.attention.transformer_engine import TRANSFORMER_ENGINE
from tests.custom_modules.support import kernel_stand_ins
from tests.reference import attention as reference

KERNELS = (CUDA_FLASH, CUDNN, FLASH_ATTN_2, FLASH_ATTN_3, TRANSFORMER_ENGINE)
EACH = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 2), (4, 1)], ids=str)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
CUDA = torch.device("cuda")
DOCUMENTS = Documents.of([[1, 30, 33], [64], [2, 61, 1]])  # the stand-ins' and the device's test
# q k^T, weights, out and gradients are each rounded to 8 bits: a few of 2^-8, relative to the
# largest value of the tensor, since the rounding of a sum is that of its terms.
BF16_TOLERANCE = 2**-6
# bf16 inputs are exact in the reference, and scores and their sums are fp32 in the kernels; an
# exponential or logarithm of the hardware is good to some 2^-21 of scores below 16.
LSE_TOLERANCE = 1e-4


@pytest.fixture
def hopper(monkeypatch) -> dict[str, str]:
    """Pretend to an H100 with every package; return the versions, to be changed."""
    versions = {"flash-attn": "2.8.3.post1", "transformer-engine": "2.9.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return versions


@EACH
@pytest.mark.usefixtures("hopper")
def test_a_device_that_has_what_a_kernel_needs_is_not_refused(kernel):
    for dtype in (torch.bfloat16, torch.float16):
        assert kernel.refusal(CUDA, dtype, 128) is None


@EACH
def test_another_device_is_refused_by_name(kernel):
    refusal = kernel.refusal(torch.device("cpu"), torch.bfloat16, 64)
    assert refusal == "needs a CUDA device, not cpu"


@EACH
def test_a_machine_without_cuda_is_refused(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch finds none" in kernel.refusal(CUDA, torch.bfloat16, 64)


@EACH
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_dtype_of_more_bits_is_refused_by_name(kernel, dtype):
    assert kernel.refusal(CUDA, dtype, 64) == f"needs bf16 or fp16, not {dtype}"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("kernel", "largest"),
    list(zip(KERNELS, (256, 128, 256, 256, 128), strict=True)),
    ids=lambda value: getattr(value, "name", None),
)
def test_head_sizes_without_a_kernel_are_refused_with_the_bound(kernel, largest):
    assert kernel.refusal(CUDA, torch.bfloat16, largest) is None
    for head_dim in (100, largest + 8):
        refusal = kernel.refusal(CUDA, torch.bfloat16, head_dim)
        assert refusal == f"takes head sizes up to {largest} that 8 divides, not {head_dim}"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("kernel", "found", "words"),
    [
        (CUDA_FLASH, (7, 5), "8.0 or newer, not 7.5"),
        (CUDNN, (7, 5), "8.0 or newer, not 7.5"),
        (FLASH_ATTN_2, (7, 5), "8.0 or newer, not 7.5"),
        (TRANSFORMER_ENGINE, (7, 5), "8.0 or newer, not 7.5"),
        (FLASH_ATTN_3, (8, 6), "9.0 or newer, not 8.6"),
        (FLASH_ATTN_3, (10, 0), "9.x, not 10.0"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_device_of_another_generation_is_refused(kernel, found, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    assert words in kernel.refusal(CUDA, torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("kernel", "package", "words"),
    [
        (FLASH_ATTN_2, "flash-attn", "pip install flash-attn"),
        (TRANSFORMER_ENGINE, "transformer-engine", "make gpu"),
    ],
    ids=["flash_attn_2", "transformer_engine"],
)
def test_a_package_that_is_not_installed_or_of_another_release_is_named(
    hopper, kernel, package, words
):
    hopper[package] = "1.14.1"
    assert kernel.refusal(CUDA, torch.bfloat16, 64).startswith(f"takes {package} 2.")
    assert kernel.refusal(CUDA, torch.bfloat16, 64).endswith("not 1.14.1")
    del hopper[package]
    assert kernel.refusal(CUDA, torch.bfloat16, 64).startswith("is not installed")
    assert words in kernel.refusal(CUDA, torch.bfloat16, 64)


@pytest.mark.usefixtures("hopper")
def test_flash_attention_3_without_its_module_says_where_it_is(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "folder hopper" in FLASH_ATTN_3.refusal(CUDA, torch.bfloat16, 64)


@pytest.mark.usefixtures("hopper")
def test_a_build_without_cudnn_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert "needs cuDNN" in CUDNN.refusal(CUDA, torch.bfloat16, 64)


def made_up(
    heads: int, kv_heads: int, s: int, t: int, *, head_dim: int = 16, dtype=torch.float64
) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output, views of [b, s, h, D] as models have them."""
    generator = torch.Generator().manual_seed(s + t)
    shapes = [(heads, s), (kv_heads, t), (kv_heads, t), (heads, s)]
    return [
        torch.randn((3, n, h, head_dim), generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        for h, n in shapes
    ]


def expected(tensors: list[torch.Tensor], causal: bool, documents: Documents | None = None):
    """Return out, lse, dq, dk and dv by the reference, float64 on CPU."""
    q, k, v, grad_out = (t.detach().cpu().double() for t in tensors)
    results = [torch.empty_like(q), q.new_empty(q.shape[:3]), *map(torch.empty_like, (q, k, v))]
    whole = [(row, slice(None)) for row in range(q.shape[0])]
    pieces = whole if documents is None else [
        (row, slice(*span)) for row in range(documents.batch) for span in documents.spans(row)
    ]  # fmt: skip
    for row, span in pieces:
        part = [x[row : row + 1, :, span] for x in (q, k, v, grad_out)]
        _, lse = reference.attention(*part[:3], causal=causal)
        out, *gradients = reference.attention_with_gradients(*part, causal=causal)
        for result, found in zip(results, (out, lse, *gradients), strict=True):
            result[row : row + 1, :, span] = found
    return results


def assert_is_the_formula(
    kernel: AttentionKernel, tensors: list[torch.Tensor], causal: bool, tolerances: tuple,
    documents: Documents | None = None,
) -> None:  # fmt: skip
    """Compare out, lse and gradients; tolerances are of the largest value, and of lse."""
    q, k, v, grad_out = tensors
    right = expected(tensors, causal, documents)
    out, lse = kernel.forward(q, k, v, causal, documents)
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    gradients = kernel.backward(grad_out, q, k, v, out, lse, causal, documents)
    of_values, of_lse = tolerances
    assert_close("lse", lse, right[1], of_lse)
    assert {t.dtype for t in (out, *gradients)} == {q.dtype}
    for name, ours, other in zip(
        ("out", "dq", "dk", "dv"), (out, *gradients), (right[0], *right[2:]), strict=True
    ):
        assert_close(name, ours, other, of_values * max(1, float(other.abs().max())))


def assert_close(name: str, ours: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == right.shape, name
    error = float((ours.cpu().double() - right).abs().max())
    assert error <= tolerance, f"{name} is off by {error:.1e}, {tolerance:.1e} is allowed"


def assert_parts_add_up(
    kernel: AttentionKernel, tensors: list[torch.Tensor], of_values: float
) -> None:
    """Give the backward two parts of the keys, and the out and lse of all."""
    q, k, v, grad_out = tensors
    right_out, right_lse, *right = expected(tensors, causal=False)
    out = right_out.to(q.device, q.dtype)
    # As a view of another order: merged results come so.
    lse = right_lse.to(q.device, torch.promote_types(q.dtype, torch.float32))
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    cut = k.shape[2] // 3
    parts = [
        kernel.backward(grad_out, q, k[:, :, part], v[:, :, part], out, lse, False, None)
        for part in (slice(cut), slice(cut, None))
    ]
    dq = parts[0][0].double() + parts[1][0].double()
    dk, dv = (torch.cat([part[i] for part in parts], dim=2) for i in (1, 2))
    for name, ours, other in zip(("dq", "dk", "dv"), (dq, dk, dv), right, strict=True):
        assert_close(name, ours, other, of_values * max(1, float(other.abs().max())))


@pytest.fixture(params=["2", "3 of 2.8.3", "3 of 3.0.0", "transformer engine", "flash", "cudnn"])
def over_stand_ins(request, monkeypatch) -> AttentionKernel:
    """Put the formula below a kernel pair, behind the functions that it calls."""
    match request.param:
        case "2":
            module = kernel_stand_ins.flash_attn_2()
            modules = {"flash_attn": ModuleType("flash_attn"), module.__name__: module}
            kernel = FLASH_ATTN_2
        case "3 of 2.8.3":
            modules = {"flash_attn_interface": kernel_stand_ins.flash_attn_3_of_2_8_3()}
            kernel = FLASH_ATTN_3
        case "3 of 3.0.0":
            modules = {"flash_attn_interface": kernel_stand_ins.flash_attn_3_of_3_0_0()}
            kernel = FLASH_ATTN_3
        case "transformer engine":
            modules, kernel = kernel_stand_ins.transformer_engine(), TRANSFORMER_ENGINE
        case name:
            modules, kernel = {}, CUDNN if name == "cudnn" else CUDA_FLASH
    monkeypatch.setattr(pytorch_cuda, "aten", kernel_stand_ins.Aten)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return kernel


@HEADS
@CAUSAL
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_over_exact_stand_ins_a_kernel_is_the_formula(
    over_stand_ins, heads, kv_heads, causal, documents
):
    tensors = made_up(heads, kv_heads, 64, 64)
    assert_is_the_formula(over_stand_ins, tensors, causal, (1e-10, 1e-10), documents)


@pytest.mark.parametrize(("s", "t"), [(5, 9), (9, 5), (1, 7), (7, 1), (1, 1)])
def test_over_exact_stand_ins_queries_and_keys_may_differ_in_length(over_stand_ins, s, t):
    assert_is_the_formula(over_stand_ins, made_up(6, 2, s, t), False, (1e-10, 1e-10))


def test_over_exact_stand_ins_parts_of_a_longer_attention_add_up(over_stand_ins):
    assert_parts_add_up(over_stand_ins, made_up(6, 2, 7, 12), 1e-10)


@pytest.mark.parametrize("documents", [None, Documents.of([[3, 5, 4]])], ids=["whole", "documents"])
def test_over_exact_stand_ins_the_backward_takes_any_strides(over_stand_ins, documents):
    q, k, v, grad_out = (t[:1] for t in made_up(6, 2, 12, 12))
    out, lse, *right = expected([q, k, v, grad_out], True, documents)
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    ours = over_stand_ins.backward(
        grad_out.contiguous(), q, k, v, out.contiguous(), lse, True, documents
    )
    for name, gradient, other in zip(("dq", "dk", "dv"), ours, right, strict=True):
        assert_close(name, gradient, other, 1e-10)


@HEADS
@pytest.mark.parametrize("kernel", [CUDA_FLASH, CUDNN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_the_operators_of_this_pytorch_take_the_arguments(kernel, heads, kv_heads, documents):
    q, k, v = (
        torch.empty(3, n, 64, 32, dtype=torch.bfloat16, device="meta")
        for n in (heads, kv_heads, kv_heads)
    )
    out, lse = kernel.forward(q, k, v, True, documents)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    gradients = kernel.backward(torch.empty_like(q), q, k, v, out, lse, True, documents)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    assert {gradient.dtype for gradient in gradients} == {q.dtype}


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def on_device(request) -> AttentionKernel:
    kernel = request.param
    if refusal := kernel.refusal(CUDA, torch.bfloat16, 128):
        pytest.skip(f"{kernel.name} {refusal}")
    return kernel


def on_cuda(*sizes: int, head_dim: int) -> list[torch.Tensor]:
    return [t.to(CUDA) for t in made_up(*sizes, head_dim=head_dim, dtype=torch.bfloat16)]


@pytest.mark.gpu
@NEEDS_CUDA
@HEADS
@CAUSAL
@pytest.mark.parametrize(("length", "head_dim"), [(2, 64), (65, 128), (300, 64), (129, 96)])
def test_on_the_device_a_kernel_is_the_formula(
    on_device, heads, kv_heads, causal, length, head_dim
):
    tensors = on_cuda(heads, kv_heads, length, length, head_dim=head_dim)
    assert_is_the_formula(on_device, tensors, causal, (BF16_TOLERANCE, LSE_TOLERANCE))


@pytest.mark.gpu
@NEEDS_CUDA
@HEADS
@CAUSAL
def test_on_the_device_documents_do_not_see_each_other(on_device, heads, kv_heads, causal):
    tensors = on_cuda(heads, kv_heads, 64, 64, head_dim=64)
    assert_is_the_formula(on_device, tensors, causal, (BF16_TOLERANCE, LSE_TOLERANCE), DOCUMENTS)


@pytest.mark.gpu
@NEEDS_CUDA
@HEADS
@pytest.mark.parametrize(("s", "t"), [(64, 200), (200, 64), (1, 70), (70, 1), (1, 1), (33, 131)])
def test_on_the_device_queries_and_keys_may_differ_in_length(on_device, heads, kv_heads, s, t):
    tensors = on_cuda(heads, kv_heads, s, t, head_dim=64)
    assert_is_the_formula(on_device, tensors, False, (BF16_TOLERANCE, LSE_TOLERANCE))


@pytest.mark.gpu
@NEEDS_CUDA
@HEADS
def test_on_the_device_parts_of_a_longer_attention_add_up(on_device, heads, kv_heads):
    assert_parts_add_up(on_device, on_cuda(heads, kv_heads, 96, 192, head_dim=64), BF16_TOLERANCE)


@pytest.mark.gpu
@NEEDS_CUDA
def test_on_the_device_strides_of_the_output_may_change_between_calls(on_device):
    q, k, v, grad_out = on_cuda(4, 2, 64, 64, head_dim=64)
    out, lse = on_device.forward(q, k, v, True, None)
    first = on_device.backward(grad_out, q, k, v, out, lse, True, None)
    again = on_device.backward(grad_out.contiguous(), q, k, v, out.contiguous(), lse, True, None)
    for one, other in zip(first, again, strict=True):
        assert_close("gradient", one, other.cpu().double(), 2**-8 * float(one.abs().max()))
