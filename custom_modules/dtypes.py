# SPDX-License-Identifier: Apache-2.0
"""The dtype of sums over many elements."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a log-sum-exp over inputs of `dtype`, which is also the one to merge in.

    fp32 for bf16 and fp16: a log-sum-exp grows with the logarithm of the length, and bf16 holds
    it to two digits.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
