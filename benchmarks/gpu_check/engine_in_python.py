# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's modules without its kernels: products and norms in PyTorch.

What its modules do around the kernels stays: which operand is transposed, what is saved, gathered,
scattered and accumulated, in which dtype. Replaced are `general_gemm`, the norms, and the buffer
that cuBLAS works in.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MODULES = ("linear", "layernorm_linear", "layernorm_mlp")


@contextmanager
def engine_in_python() -> Iterator[None]:
    """Replace the kernels in this context; nothing where Transformer Engine is not installed."""
    try:
        import transformer_engine.pytorch  # noqa: F401
        from transformer_engine.pytorch import module
        from transformer_engine.pytorch.ops.basic import layer_norm, rmsnorm
    except ImportError:
        yield
        return
    from importlib import import_module

    with ExitStack() as stack:
        for name in MODULES:
            found = import_module(f"{module.__name__}.{name}")
            replaced = {"general_gemm": gemm, "get_workspace": _workspace}
            replaced |= {"apply_normalization": norm_forward}
            for key, value in replaced.items():
                if hasattr(found, key):
                    stack.enter_context(mock.patch.object(found, key, value))
            own = SimpleNamespace(**vars(found.tex))
            own.rmsnorm_bwd, own.layernorm_bwd = rms_backward, layer_backward
            stack.enter_context(mock.patch.object(found, "tex", own))
        stack.enter_context(mock.patch.object(rmsnorm, "rmsnorm_fwd", _rms_forward))
        stack.enter_context(mock.patch.object(rmsnorm, "rmsnorm_bwd", rms_backward))
        stack.enter_context(mock.patch.object(layer_norm, "layernorm_fwd", _layer_forward))
        stack.enter_context(mock.patch.object(layer_norm, "layernorm_bwd", layer_backward))
        yield


def _workspace(*_: object) -> Tensor:
    return torch.empty(1, dtype=torch.uint8)


def gemm(
    first: Tensor,
    second: Tensor,
    workspace: object = None,
    out_dtype: torch.dtype | None = None,
    *,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    grad: bool = False,
    **other: Any,
) -> tuple[Tensor | None, ...]:
    """Return a product of cuBLAS's column-major layouts: TN is `second @ first.T`, and so on."""
    one, two = first.flatten(0, -2), second.flatten(0, -2)
    one = one.T if layout[0] == "T" else one
    two = two.T if layout[1] == "T" else two
    made = (two @ one).to(out_dtype or second.dtype)
    of_bias = None
    if bias is not None:
        if grad:
            of_bias = second.flatten(0, -2).sum(0).to(bias.dtype)
        else:
            made = made + bias
    if layout[1] == "N":
        made = made.view(*second.shape[:-1], made.shape[-1])
    if out is not None:
        made = out.add_(made) if accumulate else out.copy_(made.view(out.shape))
    return made, of_bias, None, None


def norm_forward(
    x: Tensor,
    _out: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    _quantizer: object,
    _dtype: object,
    normalization: str,
    _margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the norm of x [n, h], the mean (of a LayerNorm) and the reciprocal deviation."""
    wide, scale = x.float(), weight.float() + zero_centered
    mean = wide.mean(-1) if normalization == "LayerNorm" else None
    centered = wide if mean is None else wide - mean[:, None]
    deviation = (centered.square().mean(-1) + eps).rsqrt()
    made = centered * deviation[:, None] * scale
    if bias is not None:
        made = made + bias.float()
    return made.to(x.dtype), mean, deviation


def _rms_forward(
    x: Tensor, weight: Tensor, eps: float, _out: object, _quantizer: object, _dtype: object,
    _margin: int, zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    made, _, deviation = norm_forward(
        x, None, weight, None, eps, None, None, "RMSNorm", 0, zero_centered
    )
    return made, None, deviation


def _layer_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, _out: object, _quantizer: object,
    _dtype: object, _margin: int, zero_centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    return norm_forward(x, None, weight, bias, eps, None, None, "LayerNorm", 0, zero_centered)


def rms_backward(
    grad: Tensor, x: Tensor, deviation: Tensor, weight: Tensor, _margin: int, zero_centered: bool,
    *_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x [n, h] and of the weight [h]."""
    wide, into = x.float().view(len(deviation), -1), grad.float().view(len(deviation), -1)
    scaled = into * (weight.float() + zero_centered)
    normal = wide * deviation[:, None]
    dx = deviation[:, None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (into * normal).sum(0).to(weight.dtype)


def layer_backward(
    grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, _margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x [n, h], the weight [h] and the bias [h]."""
    wide, into = x.float().view(len(deviation), -1), grad.float().view(len(deviation), -1)
    scaled = into * (weight.float() + zero_centered)
    normal = (wide - mean[:, None]) * deviation[:, None]
    rest = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
    dx = deviation[:, None] * (scaled - rest)
    dtype = weight.dtype
    return dx.to(x.dtype), (into * normal).sum(0).to(dtype), into.sum(0).to(dtype)
