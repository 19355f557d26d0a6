# SPDX-License-Identifier: Apache-2.0
"""Live bytes by category, at the overall peak and at the peak of each category.

    with MemoryByCategory() as memory:
        step()
    memory.at_peak["attention"], memory.most["attention"], memory.peak_bytes

A `ByteCounter` with the category of each storage (`custom_modules.profiling.categories`). `at_peak`
is a copy of all categories from the moment when most bytes were live: its sum over all but host is
`peak_bytes` to the byte; `most` has the peak of each category, which may be at different moments.

**Forward.** A storage belongs to the innermost `category` around its operator.

**Backward.** No context is open there, so a storage belongs to the category in which the autograd
node that now runs was made. Nodes are numbered as they are made: where the category changes, the
next number is noted, and a node's number is looked up among the notes. A context opened inside a
node's own backward comes first: a layer that is recomputed there names its parts again, and the
nodes it makes are looked up like any other. What an accumulation node allocates is a gradient.

**Communication.** A storage that a message, an all-to-all or an all-gather receives into moves to
communication. If it was allocated in a context that ends before the storage does, it moves back to
the context's own category: then it is kept for backward, and is not a buffer. In-place collectives
and reduce-scatter move nothing, since their results are the layer's own activations.

**Host.** Bytes on another device than the measured one, or allocated for the category host, do not
belong to the device: they have a row, but do not count in the peak.

Autograd runs on the calling thread inside the context, since nodes are numbered by thread. Costs
one dictionary entry per live storage and one note per change of category; keeps no tensor alive.

Limits: bytes are those requested, not an allocator's blocks; workspaces of kernels are not seen; a
weight's gradient counts for its module until it is added to the buffer.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.utils._pytree import tree_leaves

from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.profiling.categories import CATEGORIES, Category, counting_with

FIXED: tuple[Category, ...] = ("weights", "gradients", "optimizer", "host")
"""Causes that do not change when a storage is received into or passed on."""
_Node = tuple[int, int]
"""A backward pass and the number of a node in it."""
_ACCUMULATION = 2**64 - 1
"""The number of every node that adds up the gradient of a leaf."""


@dataclass(slots=True)
class _Frame:
    """An open category: where it was opened, and the storages received in it."""

    name: Category
    node: _Node | None
    first: int
    """The count of storages when it was opened."""
    received: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Storage:
    category: Category
    number: int


class MemoryByCategory(ByteCounter):
    """A counter by category of the bytes on one device and of those on the host."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Begin with nothing held; the device is the CPU if none is given."""
        super().__init__()
        self.device = device or torch.device("cpu")
        self.live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.most = dict(self.live)
        self.at_peak = dict(self.live)
        self.peak_in: tuple[Category, bool] = ("other", False)
        """The category whose allocation made the peak, and whether it was in backward."""
        self._storages: dict[int, _Storage] = {}
        self._arrived = 0
        self._frames: list[_Frame] = []
        self._numbers: list[int] = [0]
        self._names: list[Category] = ["other"]
        self._ended = 0
        """The number of the next node when the last operator ended."""

    def restart(self) -> None:
        """Reset the peaks; live storages stay counted."""
        super().restart()
        self.most, self.at_peak = dict(self.live), dict(self.live)

    def __enter__(self) -> "MemoryByCategory":
        super().__enter__()
        self._entered.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._entered.enter_context(counting_with(self))
        return self

    @contextmanager
    def category(self, name: Category) -> Iterator[None]:
        """Count the allocations inside the context under a name."""
        frame = _Frame(name, _running_node(), self._arrived)
        self._frames.append(frame)
        self._note(_get_sequence_nr())
        try:
            yield
        finally:
            self._frames.pop()
            self._settle(frame)
            self._note(_get_sequence_nr())

    def retag(self, tensor: Tensor, name: Category) -> None:
        """Count the storage of a tensor under another name from now on."""
        key = tensor.untyped_storage()._cdata
        known = self._storages.get(key)
        if known is not None and (known.category not in FIXED or name in FIXED):
            self._move(key, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(self._ended)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        self._ended = _get_sequence_nr()
        received = _RECEIVED.get(str(func))
        for tensor in received(args) if received else ():
            key = tensor.untyped_storage()._cdata
            if key in self._storages and self._storages[key].category not in FIXED:
                self._move(key, "communication")
                if self._frames:
                    self._frames[-1].received.append(key)
        return result

    def _arrive(self, storage: torch.UntypedStorage) -> None:
        super()._arrive(storage)
        elsewhere = storage.device.type != self.device.type
        self._storages[storage._cdata] = _Storage(
            "host" if elsewhere else self._current(), self._arrived
        )
        self._arrived += 1

    def _grow(self, key: int, size: int) -> None:
        name = self._storages[key].category
        self.live[name] += size
        self.most[name] = max(self.most[name], self.live[name])
        if name == "host":
            return
        before = self.peak_bytes
        super()._grow(key, size)
        if self.peak_bytes > before:
            self.at_peak = dict(self.live)
            self.peak_in = self._current(), _running_node() is not None

    def _release(self, key: int) -> None:
        super()._release(key)
        del self._storages[key]

    def _move(self, key: int, name: Category) -> None:
        size = self._held[key]
        self._grow(key, -size)
        self._storages[key].category = name
        self._grow(key, size)

    def _settle(self, frame: _Frame) -> None:
        """Assign the storages received in an ended frame, and still held, to its category."""
        for key in frame.received:
            known = self._storages.get(key)
            if known is None or known.category != "communication":
                continue
            if known.number >= frame.first:
                self._move(key, frame.name)
            elif self._frames:
                self._frames[-1].received.append(key)

    def _current(self) -> Category:
        node = _running_node()
        if self._frames and self._frames[-1].node == node:
            return self._frames[-1].name
        if node is None:
            return "other"
        if node[1] == _ACCUMULATION:
            return "gradients"
        return self._names[bisect_right(self._numbers, node[1]) - 1]

    def _note(self, number: int) -> None:
        """Note the category of the nodes from a number on, if it differs from the last."""
        name = self._current()
        if name == self._names[-1]:
            return
        if number > self._numbers[-1]:
            self._numbers.append(number)
            self._names.append(name)
        else:
            self._names[-1] = name


def _running_node() -> _Node | None:
    node = torch._C._current_autograd_node()
    return None if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())


def _first_argument(args: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]


_RECEIVED: dict[str, Callable[[Any], Iterable[Tensor]]] = dict.fromkeys(
    (
        "c10d.recv_.default",
        "c10d.recv_any_source_.default",
        "c10d.alltoall_.default",
        "c10d.alltoall_base_.default",
        "c10d.allgather_.default",
        "c10d._allgather_base_.default",
        "c10d.allgather_into_tensor_coalesced_.default",
    ),
    _first_argument,
)
