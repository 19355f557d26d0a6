# SPDX-License-Identifier: Apache-2.0
"""PyTorch's built-in attention operators for CUDA: FlashAttention 2, and cuDNN's.

    cuda_flash    aten._flash_attention_forward and _backward
    cudnn         aten._scaled_dot_product_cudnn_attention and its backward

PyTorch's own `scaled_dot_product_attention` calls the same operators and keeps the log-sum-exp to
itself; called directly they return it. Both take fewer KV heads than query heads as they are: k
and v are never expanded. In the backward both compute

    delta = rowsum(grad_out * out)
    P = exp(q k^T / sqrt(D) - lse)
    dS = P * (grad_out v^T - delta)

from the `out` and `lse` they are given, natural logarithm, so those of a longer attention serve.

Flash wants [b, s, h, D], a transposed view, and takes documents in one call over the rows laid end
to end, [b s, h, D], with the cumulative lengths; its lse is then [h, b s]. Where the rows cannot
be viewed so, they are copied: b s (h + 2 g) D elements forward, b s (3 h + 2 g) D backward. With
g < h its backward also holds dk and dv of h heads while it runs, rounds them, and then adds them.

cuDNN's sequences of unequal length are experimental in PyTorch (log-sum-exp of another shape and
offset in one release after another), so documents are one call each. It builds a plan for each
new pair of lengths, on the host, and keeps it: documents of random lengths are slow in every step,
so `auto` takes another kernel for them. Not every release has a plan for a single query or a single
key; those go to flash.

The operators are private: names and order are those of PyTorch 2.9 to 2.13. cuDNN's log-sum-exp is
[b, h, s, 1] there and [b, h, s] in snapshots of 2.9 before August 2025; either is taken. They run
on compute capability 8.0 or newer.

Legend as in `custom_modules.attention.kernel`.
"""

from importlib import metadata

import torch
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel, by_document

aten = torch.ops.aten


def cuda_refusal(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    largest_head: int,
    capability: tuple[int, int],
) -> str | None:
    """Return why a half-precision CUDA kernel cannot serve, or None.

    `capability` is the oldest compute capability it runs on.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, not {dtype}"
    if head_dim % 8 or head_dim > largest_head:
        return f"takes head sizes up to {largest_head} that 8 divides, not {head_dim}"
    if not torch.cuda.is_available():
        return "needs a CUDA device; PyTorch finds none here"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        return (
            f"needs compute capability {capability[0]}.{capability[1]} or newer, "
            f"not {found[0]}.{found[1]}"
        )
    return None


def package_refusal(package: str, releases: tuple[str, ...], remedy: str) -> str | None:
    """Return why an installed package cannot serve: it is missing, or of another release."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"is not installed; `{remedy}` brings it"
    if ".".join(version.split(".")[:2]) not in releases:
        return f"takes {package} {' and '.join(releases)}, not {version}"
    return None


def end_to_end(t_bhsD: Tensor) -> Tensor:
    """Return the rows laid end to end, [b s, h, D]."""
    return t_bhsD.transpose(1, 2).flatten(0, 1)


def as_rows(t_ThD: Tensor, batch: int) -> Tensor:
    """Return tokens laid end to end, [b s, h, D], as rows [b, h, s, D]."""
    return t_ThD.unflatten(0, (batch, -1)).transpose(1, 2)


def lse_end_to_end(lse_bhs: Tensor) -> Tensor:
    """Return the log-sum-exp of the rows laid end to end, [h, b s]."""
    return lse_bhs.transpose(0, 1).flatten(1).contiguous()  # the kernels address it without strides


def lse_as_rows(lse_hT: Tensor, batch: int) -> Tensor:
    """Return the log-sum-exp of tokens laid end to end, [h, b s], as rows [b, h, s]."""
    return lse_hT.unflatten(1, (batch, -1)).transpose(0, 1)


def _flash_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return cuda_refusal(device, dtype, head_dim, largest_head=256, capability=(8, 0))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse by PyTorch's FlashAttention operator."""
    if documents is None:
        out, lse, *_ = aten._flash_attention_forward(
            *(t.transpose(1, 2) for t in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0,
            causal, False,
        )  # fmt: skip
        return out.transpose(1, 2), lse
    documents.require(batch=q.shape[0], seq_length=q.shape[2])
    bounds, longest = documents.cu_seqlens(q.device), documents.longest
    out, lse, *_ = aten._flash_attention_forward(
        *(end_to_end(t) for t in (q, k, v)), bounds, bounds, longest, longest, 0.0, causal, False
    )
    return as_rows(out, documents.batch), lse_as_rows(lse, documents.batch)


def flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv by PyTorch's FlashAttention operator."""
    no_dropout = torch.empty(0, device=q.device)  # two arguments for the state of a generator
    if documents is None:
        dq, dk, dv = aten._flash_attention_backward(
            *(t.transpose(1, 2) for t in (grad_out, q, k, v, out)),
            lse.contiguous(),  # the kernel addresses it without strides
            None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    bounds, longest = documents.cu_seqlens(q.device), documents.longest
    dq, dk, dv = aten._flash_attention_backward(
        *(end_to_end(t) for t in (grad_out, q, k, v, out)), lse_end_to_end(lse), bounds, bounds,
        longest, longest, 0.0, causal, no_dropout, no_dropout,
    )  # fmt: skip
    batch = documents.batch
    return as_rows(dq, batch), as_rows(dk, batch), as_rows(dv, batch)


CUDA_FLASH = AttentionKernel(
    "cuda_flash", _flash_refusal, flash_forward, flash_backward, packed=True
)


def _cudnn_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    # Gradients of larger heads exist for some releases of cuDNN on some devices.
    refusal = cuda_refusal(device, dtype, head_dim, largest_head=128, capability=(8, 0))
    if refusal is None and not torch.backends.cudnn.is_available():
        return "needs cuDNN, which this build of PyTorch lacks"
    return refusal


_OF_CUDNN = {"dimensions": 4}
"""Dimensions of the log-sum-exp that the forward returned, which its backward takes."""


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if 1 in (q.shape[2], k.shape[2]):
        return flash_forward(q, k, v, causal, None)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    _OF_CUDNN["dimensions"] = lse.dim()
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if 1 in (q.shape[2], k.shape[2]):
        return flash_backward(grad_out, q, k, v, out, lse, causal, None)
    no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        _strided_as_output(grad_out, q), q, k, v, _strided_as_output(out, q),
        lse.reshape((*q.shape[:3], 1)[: _OF_CUDNN["dimensions"]]).contiguous(), no_dropout,
        no_dropout, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
    )  # fmt: skip
    return dq, dk, dv


def _strided_as_output(tensor: Tensor, q: Tensor) -> Tensor:
    """Return the tensor with the strides that the forward gives its output for this q.

    Plans are kept by the strides of q, k and v; in releases that leave those of out and grad_out
    out of the key, a plan made for other strides would read the wrong numbers.
    """
    if tensor.stride() == torch.empty_like(q, device="meta").stride():
        return tensor
    return torch.empty_like(q).copy_(tensor)


CUDNN = AttentionKernel("cudnn", _cudnn_refusal, *by_document(_cudnn_forward, _cudnn_backward))
