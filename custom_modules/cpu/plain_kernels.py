# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizers over torch's operators, where Transformer Engine is installed.

Megatron-Core takes Adam, SGD and the norm and scaling of gradients from Transformer Engine as soon
as it can be imported, wherever the tensors are. These are CUDA kernels, so an environment made for
GPUs could not train on its CPU, a rehearsal included. The router of experts, which takes a product
from there too, chooses by the device (`custom_modules.gpt.moe_router`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from custom_modules.patching import patched


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Have Megatron-Core's optimizers use torch's operators inside this context."""
    with ExitStack() as stack:
        for module, name, value in _stand_ins():
            stack.enter_context(patched(module, name, value))
        yield


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yield what Megatron-Core has in these places if the package is not installed."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base

    yield optimizer, "Adam", torch.optim.AdamW
    yield optimizer, "SGD", torch.optim.SGD
    yield optimizer, "USING_PYTORCH_OPTIMIZER", True
    yield distrib_optimizer, "Adam", torch.optim.Adam
    yield distrib_optimizer, "HAVE_APEX_OR_TE", False
    for module in (base, clip_grads):
        yield module, "multi_tensor_applier", utils.local_multi_tensor_applier
        yield module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale
    yield clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm
