# SPDX-License-Identifier: Apache-2.0
"""Offload of recompute's kept tensors to pinned host memory, from forward to backward.

A recomputed layer keeps its input and perhaps its attention output
(`custom_modules.memory.recompute`): per token and layer 2 * hidden / TP bytes, twice that with
attention, and the one thing that still grows with length times layers. Between its forward and its
backward nothing reads it.

Schedule, for layers 1..L of a pipeline stage and one micro-batch:

    forward of i    copies out begin when a tensor exists: the input at the layer's start, the
                    attention output when attention ends, under the rest of the layer
    end of i        the compute stream waits for the copies, and the device memory is released: a
                    slow link slows the forward instead of filling the device. The input had the
                    whole layer, the attention output the projection and the MLP after it, whose
                    work is 3 times the copy's on an H100 with PCIe 5
    backward of i   takes the input of i, waiting for its copy if it is not done, and starts the
                    copy back of the attention output of i, part of which passes under the rebuilt
                    norm and projection. When attention's kernel has run for the last time, the copy
                    back of the input of i-1 starts, under the gradients of the projection

Copies back could start a layer ahead, and their tensors would then wait on the device through
attention's backward, where the most is held. By arithmetic (8 KiB a token and tensor for a
Llama-8B, 55 GB/s, 660 TFLOP/s) a layer waits for 0.07 us a token for its attention output, and for
nothing for its input with Ulysses or a ring, 0.15 us with head-chunked attention, which spreads the
projection over its stages: of a step at 64K tokens on one GPU 1 and 3%, at 512K 0.2 and 0.7%.

The last layer's memory is released only if another forward comes before its backward; if the
backward follows at once, its tensors are taken as they are. After the first layer of a micro-batch
comes the last layer of the one whose forward is older than all others, which is the order of 1F1B;
so pipeline parallelism and gradient accumulation are chains of this schedule one after another.

Copies run on two streams of their own, one each way. Host memory is page-locked, of exactly the
sizes needed (PyTorch's pinned allocator rounds up to powers of two), allocated once and reused.
A cap limits it; beyond it, or if the machine has too little, there is an error, never swap.

Bytes over the link, a layer and micro-batch: those of `custom_modules.memory.config.SavedTensors`,
once each way. Source of the idea: ALST (arXiv 2506.13996), whose copies of layer inputs are
synchronous. Megatron-Core 0.15's own offload refuses recompute and pipeline parallelism.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from custom_modules.memory.config import LayerKind, Offload
from custom_modules.memory.pinned_pool import GIB, HostPool, host_memory_left


@dataclass(frozen=True)
class Transfer:
    """One step of a tensor's path; steps come in the order in which they were requested."""

    what: Literal["leaves", "let go", "returns", "taken"]
    micro_batch: int
    layer: int
    name: str
    """`input` or `attention`."""


class Copies(Protocol):
    """Copies that run concurrently with the computation, in the requested order each way."""

    def out(self, source: Tensor, target: Tensor) -> object:
        """Begin a copy from the device once `source` is computed; return its end."""

    def back(self, source: Tensor, target: Tensor, after: object) -> object:
        """Begin a copy to the device after `after`; return its end."""

    def wait(self, end: object) -> None:
        """Make the next computation wait for a copy's end."""

    def reuse(self, end: object) -> None:
        """Make the next copies out wait for a copy's end."""


class CpuCopies:
    """Synchronous copies within host memory, for the CPU."""

    def out(self, source: Tensor, target: Tensor) -> object:
        """Copy at once."""
        target.copy_(source)
        return None

    def back(self, source: Tensor, target: Tensor, after: object) -> object:
        """Copy at once."""
        target.copy_(source)
        return None

    def wait(self, end: object) -> None:
        """Return: it has ended."""

    def reuse(self, end: object) -> None:
        """Return: it has ended."""


class CudaCopies:
    """Copies between a GPU and page-locked memory, on a stream each way."""

    def __init__(self) -> None:
        """Create the streams on the current device."""
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()

    def out(self, source: Tensor, target: Tensor) -> object:
        """Copy on the stream out, after the work now on the current stream."""
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
        return self._out.record_event()

    def back(self, source: Tensor, target: Tensor, after: object) -> object:
        """Copy on the stream back; `target` is memory of the current stream, so wait for it."""
        self._back.wait_stream(torch.cuda.current_stream())
        self._back.wait_event(after)  # type: ignore[arg-type]
        with torch.cuda.stream(self._back):
            target.copy_(source, non_blocking=True)
        return self._back.record_event()

    def wait(self, end: object) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(end)  # type: ignore[arg-type]

    def reuse(self, end: object) -> None:
        """Make the stream out wait."""
        self._out.wait_event(end)  # type: ignore[arg-type]


@dataclass
class _Offloaded:
    """One offloaded tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    on_device: Tensor | None
    buffer: Tensor
    end: object = None
    """End of the last requested copy."""
    returned: bool = False
    """Whether `on_device` is a copy back; else it is the original tensor, not yet released."""

    def on_host(self) -> Tensor:
        """Return the buffer in the tensor's shape and order."""
        return self.buffer.view(self.dtype).as_strided(self.size, self.stride)


class HostStore:
    """Kept tensors of one layer in one forward (a `recompute.ActivationStore`)."""

    def __init__(self, offload: "HostOffload", layer: int, micro_batch: int) -> None:
        """Begin with nothing."""
        self.layer, self.micro_batch = layer, micro_batch
        self._offload = offload
        self._staying: dict[str, list[Tensor]] = {}
        self._moved: dict[str, list[_Offloaded]] = {}

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Begin the copies out of the tensors that the plan offloads; keep the others."""
        if not self._offload.sends(self.layer, name):
            self._staying[name] = list(tensors)
            return
        self._offload.meet(tensors[0].device)
        self._offload.foresee(name, sum(tensor.nbytes for tensor in tensors))
        self._moved[name] = [self._leave(tensor) for tensor in tensors]
        self._say("leaves", name)

    def finish(self) -> None:
        """Release the device memory."""
        self._offload.finished(self)

    def take(self, name: str) -> list[Tensor]:
        """Return the tensors added under a name, on the device.

        With the input, the copy back of this layer's attention output is started.
        """
        if name not in self._moved:
            taken = self._staying.pop(name)
        else:
            self.fetch(name)
            held = self._moved.pop(name)
            for one in held:
                if one.returned:
                    self._offload.copies.wait(one.end)
            taken = [one.on_device for one in held if one.on_device is not None]
            self._say("taken", name)
            self._offload.taken(self, held)
        if name == "input":
            self.fetch("attention")
            self._offload.begun(self)
        return taken

    def attention_ended(self) -> None:
        """Start the copy back of the input of the layer that comes next."""
        self._offload.fetch_after(self)

    def fetch(self, name: str) -> None:
        """Start the copies back of tensors that are not on the device."""
        held = self._moved.get(name, [])
        if any(one.on_device is None for one in held):
            for one in held:
                self._return(one)
            self._say("returns", name)

    def let_go(self) -> None:
        """Free the device memory of offloaded tensors, after their copies."""
        for name, held in self._moved.items():
            for one in held:
                self._offload.copies.wait(one.end)
                one.on_device = None
            self._say("let go", name)

    def _leave(self, tensor: Tensor) -> _Offloaded:
        pool, copies = self._offload.pool, self._offload.copies
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        tensor = tensor if dense else tensor.contiguous()
        buffer, end = pool.take(tensor.nbytes)
        if end is not None:
            copies.reuse(end)
        held = _Offloaded(
            tensor.size(), tensor.stride(), tensor.dtype, tensor.device, tensor, buffer
        )
        held.end = copies.out(tensor, held.on_host())
        return held

    def __del__(self) -> None:
        # A graph that is dropped without a backward.
        self._offload.reclaim([one for held in self._moved.values() for one in held])

    def _return(self, held: _Offloaded) -> None:
        held.on_device = torch.empty_strided(
            held.size, held.stride, dtype=held.dtype, device=held.device
        )
        held.end = self._offload.copies.back(held.on_host(), held.on_device, held.end)
        held.returned = True

    def _say(self, what: Literal["leaves", "let go", "returns", "taken"], name: str) -> None:
        self._offload.listener(Transfer(what, self.micro_batch, self.layer, name))


class HostOffload:
    """The offload of one pipeline stage's layers."""

    def __init__(
        self,
        plan: Offload,
        kinds: Mapping[int, LayerKind],
        *,
        input_stays: int | None = None,
        ranks_per_node: int = 1,
        copies: Copies | None = None,
        memory_left: Callable[[], int] = host_memory_left,
        listener: Callable[[Transfer], None] = lambda moved: None,
    ) -> None:
        """Take the plan, and the kind of each recomputed layer of the stage, by number from 1.

        `input_stays` is the layer whose input came from another rank: the pipeline schedule holds
        that until the backward anyway. `ranks_per_node` ranks share the host's memory equally.
        `copies` default to those of the tensors' device. `listener` receives each step of the
        schedule.
        """
        self.plan, self.kinds = plan, dict(kinds)
        self.input_stays = input_stays
        self.ranks_per_node = ranks_per_node
        self.memory_left, self.listener = memory_left, listener
        self._waiting: list[weakref.ref[HostStore]] = []
        """Layers whose backward is to come, in the order of their forwards."""
        self._newest: tuple[int, int] = (-1, 0)
        """Micro-batch and layer of the last forward that began."""
        self._last: weakref.ref[HostStore] | None = None
        """The last layer that keeps something, whose backward may follow at once."""
        self._borrowed: dict[tuple[int, int], list[_Offloaded]] = {}
        """By micro-batch and layer, tensors taken before their copy out was done: their device
        memory must outlast that copy, so it is held until the next layer's backward."""
        self._foreseen: dict[str, int] = {}
        self._pool: HostPool | None = None
        self._copies = copies

    def sends(self, layer: int, name: str) -> bool:
        """Whether the tensors of that name leave the device."""
        if not self.plan.takes(layer):
            return False
        if name == "input":
            return self.plan.inputs and layer != self.input_stays
        return self.plan.attention and self.kinds[layer] == "kept_attention"

    def keeping(self, layer: int) -> HostStore:
        """Return the store of a layer whose forward begins now."""
        micro_batch, before = self._newest
        if layer <= before or micro_batch < 0:
            micro_batch += 1
        self._newest = (micro_batch, layer)
        if not any(ref() for ref in self._waiting):
            # The backward has ended, and its copies before it.
            for other in list(self._borrowed):
                self.reclaim(self._borrowed.pop(other))
        made = HostStore(self, layer, micro_batch)
        self._waiting.append(weakref.ref(made))
        return made

    def foresee(self, name: str, size: int) -> None:
        """Raise MemoryError at the first layer if one micro-batch of all layers cannot fit."""
        if name not in self._foreseen:
            senders = sum(self.sends(layer, name) for layer in self.kinds)
            self._foreseen[name] = size * senders
            more = sum(self._foreseen.values()) - self.pool.made_bytes
            self.pool.require(more, ranks=self.ranks_per_node)

    def finished(self, layer: HostStore) -> None:
        """Release a layer's tensors; the last layer's only if another micro-batch comes first."""
        before = None if self._last is None else self._last()
        if before is not None:
            before.let_go()
        self._last = None
        if layer.layer == max(self.kinds):
            self._last = weakref.ref(layer)
        else:
            layer.let_go()

    def taken(self, layer: HostStore, moved: Sequence[_Offloaded]) -> None:
        """Return the host memory of tensors copied back; others may still be copied out."""
        for one in moved:
            if one.returned:
                self.pool.give(one.buffer, one.end)
            else:
                self._borrowed.setdefault((layer.micro_batch, layer.layer), []).append(one)

    def begun(self, layer: HostStore) -> None:
        """Record that a layer's backward has begun."""
        if self._last is not None and self._last() is layer:
            self._last = None
        for other in [key for key in self._borrowed if key != (layer.micro_batch, layer.layer)]:
            self.reclaim(self._borrowed.pop(other))
        self._waiting = [ref for ref in self._waiting if ref() not in (None, layer)]

    def fetch_after(self, layer: HostStore) -> None:
        """Start the copy back of the input of the layer whose backward comes next."""
        waiting = [ref() for ref in self._waiting]
        following = self._following(layer, [one for one in waiting if one is not None])
        if following is not None:
            following.fetch("input")

    def reclaim(self, moved: Sequence[_Offloaded]) -> None:
        """Return the host memory of tensors, and release their device memory after its copies."""
        for one in moved:
            self.copies.wait(one.end)
            one.on_device = None
            self.pool.give(one.buffer, one.end)

    @property
    def pool(self) -> HostPool:
        """The host memory."""
        if self._pool is None:
            self._pool = HostPool(
                int(self.plan.cap_gib * GIB),
                pin=isinstance(self.copies, CudaCopies),
                memory_left=self.memory_left,
            )
        return self._pool

    @property
    def copies(self) -> Copies:
        """The copies, on their streams."""
        assert self._copies is not None
        return self._copies

    def meet(self, device: torch.device) -> None:
        """Record the device of the tensors."""
        if self._copies is None:
            self._copies = CudaCopies() if device.type == "cuda" else CpuCopies()

    def _following(self, layer: HostStore, waiting: Sequence[HostStore]) -> HostStore | None:
        """Return the layer whose backward comes next, if its forward has ended."""
        same = [one for one in waiting if one.micro_batch == layer.micro_batch]
        if same:
            return same[-1]
        oldest = [one for one in waiting if one.micro_batch == waiting[0].micro_batch]
        return oldest[-1] if oldest and oldest[-1].layer == max(self.kinds) else None
