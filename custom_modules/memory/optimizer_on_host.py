# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer with a part of it on the host, which has to wait for its own copies."""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def wait_for_weights(optimizer: Any) -> None:
    """Have what is queued after a step of the optimizer wait for the weights that it copied back.

    `optimizer` is as `get_megatron_optimizer` returns it. In Megatron-Core 0.15.3 weights are
    copied to the device in `_h2d_stream`, and the current stream waits for `_d2h_stream` alone,
    that of the gradients: the next forward, or all-gather, may read weights of the step before.
    """
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if isinstance(inner, HybridDeviceOptimizer):
            inner.register_step_post_hook(_wait)


def _wait(optimizer: Any, *_: object) -> None:
    torch.cuda.current_stream().wait_stream(optimizer._h2d_stream)
