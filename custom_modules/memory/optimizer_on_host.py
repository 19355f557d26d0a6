# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer with a part of it on the host: its copies of weights to the device.

In Megatron-Core 0.15.3 (`optimizer/cpu_offloading/hybrid_optimizer.py`)

* the fp32 copies of offloaded weights are pageable: each is pinned in bf16, and then cast into
  memory that is not. The driver stages every copy of them to the device, and the host waits for it;
* they are copied in `_h2d_stream`, and the current stream waits for `_d2h_stream` alone, that of
  the gradients: the next forward, or all-gather, may read weights of the step before.
"""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def mend_copies(optimizer: Any) -> None:
    """Pin the weights on the host, and have what follows a step wait for those that it copied back.

    `optimizer` is as `get_megatron_optimizer` returns it; parts that are all on the device stay as
    they are. Raises RuntimeError if the host has too little memory to pin.
    """
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if isinstance(inner, HybridDeviceOptimizer):
            inner.register_step_post_hook(_wait)
            inner.register_load_state_dict_post_hook(_pin)  # a load makes the copies again
            _pin(inner)


def _pin(optimizer: HybridDeviceOptimizer) -> None:
    for copy in optimizer.cpu_copys_map_gpu_param:
        copy.data = copy.data.pin_memory()


def _wait(optimizer: Any, *_: object) -> None:
    torch.cuda.current_stream().wait_stream(optimizer._h2d_stream)
