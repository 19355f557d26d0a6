# SPDX-License-Identifier: Apache-2.0
"""Shapes that cuDNN's operators return and take, with operators in their place on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from custom_modules.attention import pytorch_cuda
from custom_modules.attention.registry import CPU_FLASH

B, H, S, D = 2, 4, 8, 16


@pytest.mark.parametrize("dimensions", [3, 4], ids=["a snapshot before August 2025", "since"])
def test_the_log_sum_exp_of_cudnn_may_have_three_dimensions_or_four(dimensions, monkeypatch):
    shape = (B, H, S, 1)[:dimensions]

    def forward(q, k, v, bias, with_lse, dropout, causal, debug):
        out, lse = CPU_FLASH.forward(q, k, v, causal, None)
        return out, lse.reshape(shape), None

    def backward(grad_out, q, k, v, out, lse, *rest):
        assert lse.shape == shape
        causal = rest[-1]
        return CPU_FLASH.backward(grad_out, q, k, v, out, lse.reshape(B, H, S), causal, None)

    operators = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=forward,
        _scaled_dot_product_cudnn_attention_backward=backward,
    )
    monkeypatch.setattr(pytorch_cuda, "aten", operators)
    q, k, v, grad_out = torch.randn(4, B, H, S, D, generator=torch.Generator().manual_seed(0))
    out, lse = pytorch_cuda.CUDNN.forward(q, k, v, True, None)
    assert lse.shape == (B, H, S)
    found = pytorch_cuda.CUDNN.backward(grad_out, q, k, v, out, lse, True, None)
    expected = CPU_FLASH.backward(grad_out, q, k, v, out, lse, True, None)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
