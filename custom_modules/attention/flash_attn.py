# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 2 and 3 from the packages of Dao-AILab/flash-attention.

    flash_attn_2    package flash-attn, 2.7 and 2.8; compute capability 8.0 or newer
    flash_attn_3    its folder hopper, module flash_attn_interface; compute capability 9.x

Version 2 is newer than the copy inside PyTorch (`custom_modules.attention.pytorch_cuda`), version 3
is written for Hopper's asynchronous copies and matrix units. Layouts, documents and the backward's
`out` and `lse` are as in `pytorch_cuda` for both: [b, s, h, D] views, documents as rows laid end to
end with their cumulative lengths, lse [b, h, s] or [h, b s] in fp32 and natural logarithm, KV heads
not expanded. The differences:

* the gradients are written into preallocated tensors;
* version 2 adds the dk and dv of a group's h / g heads after rounding, version 3 in fp32 before;
* both run their deterministic backward if PyTorch's deterministic mode is on; version 3 has none
  for head sizes above 192 and raises an error.

The functions called are private, below the packages' autograd. Version 3 renamed an argument
between its release with 2.8 and 3.0.0, so the arguments that both have in the same place are given
by position.

Legend as in `custom_modules.attention.kernel`.
"""

from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.pytorch_cuda import (
    as_rows,
    cuda_refusal,
    end_to_end,
    lse_as_rows,
    lse_end_to_end,
    package_refusal,
)

_RELEASES = ("2.7", "2.8")


def _refusal_2(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    refusal = cuda_refusal(device, dtype, head_dim, largest_head=256, capability=(8, 0))
    return refusal or package_refusal(
        "flash-attn", _RELEASES, "pip install flash-attn --no-build-isolation"
    )


def _version_2() -> Any:
    return import_module("flash_attn.flash_attn_interface")  # here, since it loads CUDA libraries


def _options_2(head_dim: int, causal: bool) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": head_dim**-0.5,
        "causal": causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _forward_2(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    options = _options_2(q.shape[3], causal) | {"return_softmax": False}
    if documents is None:
        out, lse, *_ = _version_2()._flash_attn_forward(
            *(t.transpose(1, 2) for t in (q, k, v)), **options
        )
        return out.transpose(1, 2), lse
    documents.require(batch=q.shape[0], seq_length=q.shape[2])
    bounds, longest = documents.cu_seqlens(q.device), documents.longest
    out, lse, *_ = _version_2()._flash_attn_varlen_forward(
        *(end_to_end(t) for t in (q, k, v)), bounds, bounds, longest, longest, **options
    )
    return as_rows(out, documents.batch), lse_as_rows(lse, documents.batch)


def _backward_2(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = _options_2(q.shape[3], causal)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if documents is None:
        grad_out, q, k, v, out = (t.transpose(1, 2) for t in (grad_out, q, k, v, out))
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        _version_2()._flash_attn_backward(
            grad_out, q, k, v, out,
            lse.contiguous(),  # the kernel addresses it without strides
            dq, dk, dv, **options,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    bounds, longest, batch = documents.cu_seqlens(q.device), documents.longest, documents.batch
    grad_out, q, k, v, out = (end_to_end(t) for t in (grad_out, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    _version_2()._flash_attn_varlen_backward(
        grad_out, q, k, v, out, lse_end_to_end(lse), dq, dk, dv, bounds, bounds, longest, longest,
        **options,
    )  # fmt: skip
    return as_rows(dq, batch), as_rows(dk, batch), as_rows(dv, batch)


FLASH_ATTN_2 = AttentionKernel("flash_attn_2", _refusal_2, _forward_2, _backward_2, packed=True)


def _refusal_3(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    refusal = cuda_refusal(device, dtype, head_dim, largest_head=256, capability=(9, 0))
    if refusal is not None:
        return refusal
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs compute capability 9.x, not {major}.{minor}"
    if util.find_spec("flash_attn_interface") is None:
        return (
            "is not installed; `python setup.py install` in the folder hopper of "
            "github.com/Dao-AILab/flash-attention brings it"
        )
    return None


def _version_3() -> Any:
    return import_module("flash_attn_interface")  # here, since it loads CUDA libraries


def _forward_3(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    lay, bounds, longest = _layout_3(q, documents)
    out, lse, *_ = _version_3()._flash_attn_forward(
        *(lay(t) for t in (q, k, v)),
        *[None] * 4,  # new keys and values, a second q, out
        bounds, bounds, *[None] * 3,  # bounds of the new keys, used lengths of q and k
        longest, longest,
        *[None] * 9,  # pages, batch indices, left padding, rotary (3), fp8 scales (3)
        q.shape[3] ** -0.5, causal,
    )  # fmt: skip
    if documents is None:
        return out.transpose(1, 2), lse
    return as_rows(out, documents.batch), lse_as_rows(lse, documents.batch)


def _backward_3(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lay, bounds, longest = _layout_3(q, documents)
    # The kernel addresses lse without strides.
    lse = lse.contiguous() if documents is None else lse_end_to_end(lse)
    grad_out, q, k, v, out = (lay(t) for t in (grad_out, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    _version_3()._flash_attn_backward(
        grad_out, q, k, v, out, lse, bounds, bounds,
        None, None,  # used lengths of q and k
        longest, longest, dq, dk, dv, q.shape[-1] ** -0.5, causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    if documents is None:
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    batch = documents.batch
    return as_rows(dq, batch), as_rows(dk, batch), as_rows(dv, batch)


def _layout_3(q: Tensor, documents: Documents | None) -> tuple[Any, Tensor | None, int | None]:
    """Return the layout of a [b, h, s, D] tensor, and the bounds and longest of the documents."""
    if documents is None:
        return lambda t: t.transpose(1, 2), None, None
    documents.require(batch=q.shape[0], seq_length=q.shape[2])
    return end_to_end, documents.cu_seqlens(q.device), documents.longest


FLASH_ATTN_3 = AttentionKernel("flash_attn_3", _refusal_3, _forward_3, _backward_3, packed=True)
