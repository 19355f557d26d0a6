# SPDX-License-Identifier: Apache-2.0
"""Device meshes of real ranks beside fake tensors, for the construction of Megatron FSDP.

A mesh holds ranks in a tensor and computes with them, which fake tensors cannot: its methods run
outside of the fake mode here. Megatron FSDP compares each parameter's shards with those of the
other ranks, of which there are none.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def real_meshes() -> Iterator[None]:
    """Let device meshes compute with their ranks in this context."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    adapter = mcore_fsdp_adapter.FullyShardedDataParallel
    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, value in list(vars(DeviceMesh).items()):
            if isinstance(value, property) and value.fget is not None:
                patch(DeviceMesh, name, property(_outside(value.fget)))
            elif isinstance(value, FunctionType):
                patch(DeviceMesh, name, _outside(value))
        patch(adapter, "_init_dist_index", _outside(adapter._init_dist_index))
        patch(param_and_grad_buffer, "validate_uneven_dtensor", lambda _: None)
        yield


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **named)

    return called
