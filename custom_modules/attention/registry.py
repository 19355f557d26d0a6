# SPDX-License-Identifier: Apache-2.0
"""Choice of the attention kernel: by device, dtype and head size, or by name.

| name | kernel |
| --- | --- |
| `cpu_flash` | PyTorch's CPU flash operator; every floating dtype, any head size |
| `flash_attn_3` | the flash-attn package for Hopper, where installed |
| `cudnn` | PyTorch's cuDNN operator |
| `flash_attn_2` | the flash-attn package, where installed |
| `transformer_engine` | Transformer Engine's fused attention, where installed |
| `cuda_flash` | PyTorch's own FlashAttention-2 |

`auto` takes the first that can serve, in this order; where documents are kept apart, the first that
takes them all in one call (`AttentionKernel.packed`), if there is one. All take fewer KV heads than
query heads as they are: K and V are never expanded. The name is logged once for each choice.
"""

import logging
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from custom_modules.attention.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3
from custom_modules.attention.kernel import AttentionKernel, by_document
from custom_modules.attention.pytorch_cuda import CUDA_FLASH, CUDNN
from custom_modules.attention.transformer_engine import TRANSFORMER_ENGINE

KernelName = Literal[
    "auto",
    "cpu_flash",
    "flash_attn_3",
    "cudnn",
    "flash_attn_2",
    "transformer_engine",
    "cuda_flash",
]

aten = torch.ops.aten
log = logging.getLogger(__name__)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad_out, q, k, v, out, lse, 0.0, causal
    )
    return dq, dk, dv


def _cpu_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return None if device.type == "cpu" else f"computes on cpu, not on {device.type}"


CPU_FLASH = AttentionKernel("cpu_flash", _cpu_refusal, *by_document(_cpu_forward, _cpu_backward))

KERNELS = {
    kernel.name: kernel
    for kernel in (CPU_FLASH, FLASH_ATTN_3, CUDNN, FLASH_ATTN_2, TRANSFORMER_ENGINE, CUDA_FLASH)
}


@cache  # probing for packages reads the file system; the log has each choice once
def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    name: str = "auto",
    *,
    documents: bool = False,
) -> AttentionKernel:
    """Return the kernel of that name, or the first that can serve.

    With `documents`, attention ends at the ends of documents. Raises ValueError with the
    alternatives if the named kernel, or every kernel, refuses.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"attention kernel {name!r} is unknown; it is one of {_names()}")
    refusals = {known: kernel.refusal(device, dtype, head_dim) for known, kernel in KERNELS.items()}
    serving = [known for known, refusal in refusals.items() if refusal is None]
    if name != "auto" and name not in serving:
        raise ValueError(
            f"attention kernel {name} {refusals[name]}; for {_case(device, dtype, head_dim)} "
            f"there is {' or '.join(serving) if serving else 'none'}"
        )
    if not serving:
        because = "; ".join(f"{known} {refusal}" for known, refusal in refusals.items())
        raise ValueError(f"no attention kernel for {_case(device, dtype, head_dim)}: {because}")
    packed = [known for known in serving if KERNELS[known].packed] if documents else []
    chosen = KERNELS[(packed or serving)[0] if name == "auto" else name]
    apart = " and documents kept apart" if documents else ""
    log.info("attention kernel %s for %s%s", chosen.name, _case(device, dtype, head_dim), apart)
    return chosen


def _case(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device.type} with head size {head_dim}"


def _names() -> str:
    return ", ".join(get_args(KernelName))


def require_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q [s, b, h, D] and k, v [s, b, g, D] match."""
    dtypes = {"q": q.dtype, "k": k.dtype, "v": v.dtype}
    if len(set(dtypes.values())) > 1:
        mixed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"attention inputs have different dtypes ({mixed}); cast them to one")
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if len(of_q) != 4 or of_k != of_v or 0 in (*of_q, *of_k):
        raise ValueError(
            f"attention inputs are {_shapes(of_q, of_k, of_v)}; [s, b, heads, D] is needed, the "
            "same for k and v"
        )
    if (*of_q[:2], of_q[3]) != (*of_k[:2], of_k[3]):
        raise ValueError(
            f"attention inputs are {_shapes(of_q, of_k, of_v)}; they may differ only in heads"
        )
    if of_q[2] % of_k[2]:
        raise ValueError(f"{of_q[2]} query heads cannot share {of_k[2]} KV heads evenly")


def _shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> str:
    return f"q {list(q)}, k {list(k)}, v {list(v)}"
