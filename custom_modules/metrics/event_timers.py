# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step by part, from Megatron-Core's own timers and without waiting for the device.

Megatron-Core calls `config.timers(name).start()` and `.stop()` around what it computes and sends.
Its own timers synchronize the device at both. These record a CUDA event on the current stream
instead, which is read once at the end of the step, when the loss has been read and the device is
idle; without CUDA they read the clock of the process.

    forward         forward-compute, without the wait for data inside it
    backward        backward-compute; a recomputed forward is in it
    communication   sends and receives between pipeline stages, reduction of gradients, gathering of
                    parameters: what the compute stream waits for, not what overlaps with it
    optimizer       update, clipping, unscaling
    copies          batch to the device, gradients and weights between their copies

A timer that is started inside another has its time taken off the outer one, so that parts are
disjoint and add up to at most the step. What is outside of all timers is in no part: zeroing of
gradients, the reduction of the loss, callbacks, and waits of an interleaved pipeline for messages
that overlap with compute. Communication of context, tensor and expert parallelism is inside the
forward and backward, and stays there.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch

Part: TypeAlias = Literal["data", "forward", "backward", "communication", "optimizer", "copies"]
DATA_TIMER, COPY_TIMER = "batch-generator", "batch-copy"
"""Our timers; the first has the name of Megatron-LM's."""
PARTS: dict[str, Part] = {
    DATA_TIMER: "data",
    COPY_TIMER: "copies",
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-recv": "communication",
    "forward-send": "communication",
    "backward-recv": "communication",
    "backward-send": "communication",
    "forward-send-backward-recv": "communication",
    "backward-send-forward-recv": "communication",
    "forward-send-forward-recv": "communication",
    "backward-send-backward-recv": "communication",
    "forward-backward-send-forward-backward-recv": "communication",
    "all-grads-sync": "communication",
    "conditional-embedder-grads-all-reduce": "communication",
    "non-tensor-parallel-grads-all-reduce": "communication",
    "embedding-grads-all-reduce": "communication",
    "params-all-gather": "communication",
    "optimizer-copy-to-main-grad": "copies",
    "optimizer-copy-main-to-model-params": "copies",
    "optimizer-unscale-and-check-inf": "optimizer",
    "optimizer-clip-main-grad": "optimizer",
    "optimizer-count-zeros": "optimizer",
    "optimizer-inner-step": "optimizer",
}
"""Timers of Megatron-Core 0.15.3 by the part of a step; `forward-backward` spans several."""


class EventTimers:
    """What Megatron-Core takes as `config.timers`; counts between `open` and `seconds`."""

    def __init__(self) -> None:
        """Start closed: nothing is recorded before a step begins."""
        self._timers: dict[str, _Timer] = {}
        self._spare: list[Any] = []
        self.is_open = False
        """Whether a step is being timed."""
        self.on_cuda = False
        self.spans: list[_Span] = []
        self.running: list[_Span] = []

    def __call__(self, name: str, log_level: int | None = None) -> "_Timer":
        """Return the timer of a name; levels are ignored."""
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = _Timer(self, PARTS.get(name))
        return timer

    def __deepcopy__(self, memo: dict[int, Any]) -> "EventTimers":
        """Return itself: a copy of a model's config is timed by the same timers."""
        return self

    def open(self) -> None:
        """Begin a step; a timer that an error has left running is forgotten."""
        if self.on_cuda:
            self._spare += [event for span in self.spans for event in span.moments]
        self.spans.clear()
        self.running.clear()
        self.on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.is_open = True

    def now(self) -> Any:
        """Return this moment: an event on the current stream, or the seconds of the process."""
        if not self.on_cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[Part, float]:
        """End the step and return its seconds by part; the device must have finished it."""
        self.is_open = False
        parts = dict.fromkeys(PARTS.values(), 0.0)
        for span in self.spans:
            took = span.seconds(on_cuda=self.on_cuda)
            parts[span.part] += took
            if span.inside is not None:
                parts[span.inside] -= took
        return {part: max(0.0, seconds) for part, seconds in parts.items()}


class _Span:
    """A part of a step from one moment to another."""

    def __init__(self, part: Part, inside: Part | None, began: Any) -> None:
        self.part, self.inside, self.moments = part, inside, [began]

    def seconds(self, *, on_cuda: bool) -> float:
        began, ended = self.moments
        return float(began.elapsed_time(ended) / 1000 if on_cuda else ended - began)


class _Timer:
    """One of Megatron-Core's timers; it never waits, whatever `barrier` says."""

    def __init__(self, timers: EventTimers, part: Part | None) -> None:
        self._timers, self._part = timers, part

    def start(self, barrier: bool = False) -> None:
        """Begin, within the timer that runs already if there is one."""
        timers = self._timers
        if self._part is None or not timers.is_open:
            return
        inside = timers.running[-1].part if timers.running else None
        timers.running.append(_Span(self._part, inside, timers.now()))

    def stop(self, barrier: bool = False) -> None:
        """End; timers inside it that an error has left running are forgotten."""
        timers = self._timers
        if self._part is None:
            return
        while timers.running:
            span = timers.running.pop()
            if span.part == self._part:
                span.moments.append(timers.now())
                timers.spans.append(span)
                return


@contextmanager
def timed(timers: Any, name: str) -> Iterator[None]:
    """Time a block by a timer of `config.timers`, which may be None."""
    if timers is None:
        yield
        return
    timer = timers(name, log_level=2)
    timer.start()
    try:
        yield
    finally:
        timers(name).stop()
