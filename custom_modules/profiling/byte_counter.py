# SPDX-License-Identifier: Apache-2.0
"""Counter of the bytes that a piece of code holds and sends, tensor by tensor as it runs.

    with ByteCounter() as counter:
        out = block(x)
    counter.peak_bytes, counter.sent_bytes

Live bytes are those of every storage that an operator returned inside the context and that still
exists, at its current size; earlier tensors are not counted. Workspaces of kernels and of the
communication library are not seen: the counter covers what the code's author controls. Sent bytes
are those of point-to-point messages and of the parts of all-to-all that leave the rank.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from custom_modules.patching import patched


class ByteCounter(TorchDispatchMode):
    """Counts live and sent bytes of this thread and, inside backward, of autograd's."""

    def __init__(self) -> None:
        """Begin with nothing held and nothing sent."""
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.sent_bytes = 0
        self._held: dict[int, int] = {}  # bytes by storage
        self._from_before: set[int] = set()
        self._entered = ExitStack()

    def restart(self) -> None:
        """Reset the peak and the sent bytes; live storages stay counted."""
        self.peak_bytes, self.sent_bytes = self.live_bytes, 0

    def __enter__(self) -> "ByteCounter":
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> None:
            resize(
                storage, size
            )  # not an operator: Megatron frees a tensor so and leaves its views
            if storage._cdata in self._held:
                self._resize(storage._cdata, storage.nbytes())

        self._entered.enter_context(patched(torch.UntypedStorage, "resize_", counted))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its operators on the local part are dispatched again
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._leave_out(leaf.untyped_storage())
        result = func(*args, **(kwargs or {}))
        sent = _SENT.get(str(func))
        if sent is not None:
            self.sent_bytes += sent(args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        return result

    def _leave_out(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._held and key not in self._from_before:
            self._from_before.add(key)
            weakref.finalize(storage, self._from_before.discard, key)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._from_before or storage.device.type == "meta":
            return
        if key not in self._held:
            self._arrive(storage)
            weakref.finalize(storage, self._release, key)
        self._resize(key, storage.nbytes())

    def _arrive(self, storage: torch.UntypedStorage) -> None:
        """Begin to count a storage."""
        self._held[storage._cdata] = 0

    def _resize(self, key: int, size: int) -> None:
        """Count a storage at its new size."""
        grown, self._held[key] = size - self._held[key], size
        self._grow(key, grown)

    def _grow(self, key: int, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int) -> None:
        self._resize(key, 0)
        del self._held[key]


def _of_messages(args: Any) -> int:
    return sum(tensor.nbytes for tensor in args[0])


def _of_all_to_all(args: Any) -> int:
    source, group = args[1], args[2]
    size = dist.ProcessGroup.unbox(group).size()
    return int(source.nbytes * (size - 1) // size)


_SENT: dict[str, Callable[[Any], int]] = {
    "c10d.send.default": _of_messages,
    "c10d.alltoall_base_.default": _of_all_to_all,
}
