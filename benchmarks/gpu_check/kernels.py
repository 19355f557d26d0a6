# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CUDA attention kernels on fake tensors, in bf16 with heads of 128."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu_check.fake_cuda import fake_cuda
from benchmarks.gpu_check.recipes import error_in_words
from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.pytorch_cuda import CUDA_FLASH, CUDNN

HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One kernel in one case."""

    kernel: str
    case: str
    error: str = ""


def all_tried() -> list[Tried]:
    """Try each kernel in each case."""
    with fake_cuda():
        return [
            _tried(kernel, *case)
            for kernel in (CUDA_FLASH, CUDNN)
            for case in product((1, 2), ((8, 8), (8, 2)), _lengths())
        ]


def _lengths() -> Iterator[tuple[int, int, bool, bool]]:
    """Yield queries, keys, causal, documents."""
    yield 96, 96, True, False
    yield 96, 96, False, False
    yield 96, 96, True, True
    yield 48, 96, False, False
    yield 1, 96, False, False
    yield 96, 1, False, False


def _tried(
    kernel: AttentionKernel,
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int, bool, bool],
) -> Tried:
    dtype = torch.bfloat16
    queries, keys, causal, apart = lengths
    kind = "causal" if causal else "whole"
    case = f"b {batch}, {heads[0]}/{heads[1]} heads, {queries} x {keys}, {kind}"
    case += ", documents" if apart else ""
    try:
        # [s, b, h, D] as attention has them, seen as [b, h, s, D]: strided in all but the last
        q = torch.empty(queries, batch, heads[0], HEAD_DIM, dtype=dtype, device="cuda")
        k = torch.empty(keys, batch, heads[1], HEAD_DIM, dtype=dtype, device="cuda")
        q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), k.clone().permute(1, 2, 0, 3)
        documents = Documents.of([[40, 1, 55]] * batch) if apart else None
        out, lse = kernel.forward(q, k, v, causal, documents)
        _same(out, q, "out")
        if (lse.shape, lse.dtype, lse.device) != (q.shape[:3], torch.float32, q.device):
            raise AssertionError(f"lse is {list(lse.shape)} in {lse.dtype} on {lse.device}")
        found = kernel.backward(torch.empty_like(out), q, k, v, out, lse, causal, documents)
        for name, gradient, of in zip(("dq", "dk", "dv"), found, (q, k, v), strict=True):
            _same(gradient, of, name)
    except Exception as error:  # whatever the code under test raises is the result
        return Tried(kernel=kernel.name, case=case, error=error_in_words(error))
    return Tried(kernel=kernel.name, case=case)


def _same(found: Tensor, like: Tensor, name: str) -> None:
    if (found.shape, found.dtype, found.device) != (like.shape, like.dtype, like.device):
        raise AssertionError(
            f"{name} is {list(found.shape)} in {found.dtype} on {found.device}, and it should be "
            f"{list(like.shape)} in {like.dtype} on {like.device}"
        )
    if found.stride(-1) != 1:
        raise AssertionError(f"{name} is strided in its last dimension")
