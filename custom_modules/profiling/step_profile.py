# SPDX-License-Identifier: Apache-2.0
"""Profile of some training steps on one rank: PyTorch's trace or ranges for nsys, and the memory.

    profile = StepProfile(Wanted(folder=folder, first=5, last=8, rank=0), device)
    profile.start(model, optimizer, module)
    for step in (5, 6, 7, 8):
        profile.begin(step)
        ...
        profile.end()
    profile.stop()

    FOLDER/rank_0_steps_5_to_8.pt.trace.json.gz    Chrome trace, for Perfetto
    FOLDER/rank_0_steps_5_to_8.memory.pickle       snapshot of CUDA's allocator, for memory_viz
    FOLDER/rank_0_steps_5_to_8.memory.json         on CPU: bytes by category, of the last step
    FOLDER/rank_0_out_of_memory.pickle             the snapshot at an out-of-memory error
    FOLDER/summary.json                            parts and operators that took most

Either the trace or ranges for nsys, since CUPTI, which times kernels, serves one of them. With nsys
`cudaProfilerStart` and `cudaProfilerStop` stand at the ends of the steps.

On CPU there is no allocator to ask: `custom_modules.profiling.memory_by_category` counts the last
step, whose operators take longer for it. What a step computes stays the same, bit for bit.
"""

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from custom_modules.profiling.categories import Category
from custom_modules.profiling.memory_by_category import MemoryByCategory
from custom_modules.profiling.step_memory import named_parts as named_memory
from custom_modules.profiling.step_memory import state_bytes
from custom_modules.profiling.step_parts import Other, TorchRange, named_parts
from custom_modules.profiling.trace_summary import STEP, summarize, table

HISTORY = 1_000_000
"""Allocations and frees that a memory snapshot keeps at most; each takes a KB or two of host
memory, mostly for its stack."""
PATIENCE_SECONDS = 60.0
"""How long a profile waits for its device. A rank that fails in a step may have launched a message
to a rank that waits for it: waiting for that would end at the timeout of collectives, and the
error would be reported only then."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which steps of a rank are profiled, and how."""

    folder: Path
    first: int
    last: int
    rank: int
    shapes: bool = False
    """The trace has the shapes of operators' inputs."""
    stack: bool = False
    """The trace has the lines of Python that called an operator."""
    nsys: bool = False
    """Ranges for nsys instead of PyTorch's trace."""
    summary: bool = True
    """This rank writes `summary.json`."""

    def path(self, kind: str) -> Path:
        """Return the file of a kind."""
        return self.folder / f"rank_{self.rank}_steps_{self.first}_to_{self.last}.{kind}"

    @property
    def out_of_memory(self) -> Path:
        """The snapshot at an out-of-memory error."""
        return self.folder / f"rank_{self.rank}_out_of_memory.pickle"


class StepProfile:
    """The profile of one rank; it is stopped after the last step, or where training ends."""

    def __init__(self, wanted: Wanted, device: torch.device) -> None:
        """Profile nothing yet."""
        self.wanted, self.device, self.on_cuda = wanted, device, device.type == "cuda"
        self.profiler: torch.profiler.profile | None = None
        self.memory: MemoryByCategory | None = None
        self._state: dict[Category, int] = {}
        self._model: list[Any] = []
        self._optimizer: Any = None
        self._profiled, self._step = ExitStack(), ExitStack()
        self.running = self._ran_out = False

    def watch_for_out_of_memory(self) -> None:
        """Write a snapshot of the allocator when CUDA's memory runs out, before anything is freed.

        Blocks have the lines of Python that allocated them if the history is recorded.
        """
        if self.on_cuda:
            torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._at_out_of_memory())  # type: ignore[attr-defined]  # in builds with CUDA

    def record_memory(self) -> None:
        """Record CUDA's allocations from now on."""
        if self.on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")

    def start(
        self,
        model: Iterable[Any],
        optimizer: Any,
        module: Any = None,
        others: Iterable[Other] = (),
    ) -> None:
        """Begin to profile; the arguments are as in `step_parts.named_parts`."""
        wanted, self.running = self.wanted, True
        self._model, self._optimizer = list(model), optimizer
        self.record_memory()
        if wanted.nsys:
            torch.cuda.cudart().cudaProfilerStart()
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.on_cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(
                activities=activities, record_shapes=wanted.shapes, with_stack=wanted.stack
            )
            self.profiler.start()
        mark = partial(TorchRange, nvtx=wanted.nsys)
        self._profiled.enter_context(
            named_parts(self._model, optimizer, module, mark=mark, others=others)
        )

    def begin(self, step: int) -> None:
        """Begin a step."""
        if step == self.wanted.last and not self.on_cuda:
            self._state = state_bytes(self._model, self._optimizer)
            self._step.enter_context(named_memory(self._model))
            self.memory = self._step.enter_context(MemoryByCategory())
        self._step.enter_context(TorchRange(f"{STEP}{step}", nvtx=self.wanted.nsys))

    def end(self) -> None:
        """End the step."""
        self._step.close()

    def stop(self) -> None:
        """End the profile and write its files.

        A disk that refuses them stops no training, and a device that has failed or does not finish
        hides no error.
        """
        if not self.running:
            return
        self.running = False
        self._step.close()
        self._profiled.close()
        try:
            self._finish()
        except Exception as error:  # the snapshot alone may need memory that the host lacks
            said = str(error) or type(error).__name__
            sys.stderr.write(f"the profile of rank {self.wanted.rank} was not written: {said}\n")
        self.profiler, self._model, self._optimizer = None, [], None

    def _finish(self) -> None:
        done = not self.on_cuda or _is_done(self.device)
        if done and self.profiler is not None:
            self.profiler.stop()
        if done and self.wanted.nsys:
            torch.cuda.cudart().cudaProfilerStop()
        try:
            files = self._write_memory()
        finally:
            if self.on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
        if not done:
            raise RuntimeError(
                f"its device has not finished the step within {PATIENCE_SECONDS:.0f} s; there is "
                "only the snapshot of the memory"
            )
        self._write_trace(files)

    def _write_memory(self) -> list[Path]:
        wanted = self.wanted
        wanted.folder.mkdir(parents=True, exist_ok=True)
        if self.on_cuda:
            return [_whole(wanted.path("memory.pickle"), _dump_snapshot)]
        if self.memory is None:
            return []
        content = {"rank": wanted.rank, "step": wanted.last, **self._counted()}
        return [_whole(wanted.path("memory.json"), partial(_dump_json, content))]

    def _write_trace(self, files: list[Path]) -> None:
        wanted = self.wanted
        if self.profiler is None:
            return
        files.append(_whole(wanted.path("pt.trace.json.gz"), self._dump_trace))
        if wanted.summary:
            summary = {
                "rank": wanted.rank,
                "steps": [wanted.first, wanted.last],
                **summarize(self.profiler.events() or ()),
                "files": [file.name for file in files],
            }
            _whole(wanted.folder / "summary.json", partial(_dump_json, summary))
            sys.stderr.write("".join(f"{line}\n" for line in table(summary)))

    def _counted(self) -> dict[str, Any]:
        """Return the bytes of the last step on CPU, and those of the state that it found."""
        assert self.memory is not None
        return {
            "state_bytes": self._state,
            "peak_bytes": self.memory.peak_bytes + sum(self._state.values()),
            "step_peak_bytes": self.memory.peak_bytes,
            "at_peak_bytes": self.memory.at_peak,
            "most_bytes": self.memory.most,
        }

    def _dump_trace(self, path: Path) -> None:
        assert self.profiler is not None
        plain = path.with_name(f"{path.name}.json")
        try:
            self.profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as trace, gzip.open(path, "wb", compresslevel=6) as packed:
                while block := trace.read(2**20):
                    packed.write(block)
        finally:
            plain.unlink(missing_ok=True)

    def _at_out_of_memory(self) -> None:
        """Write the snapshot once; the error itself is raised after it.

        An error of this function would be raised in the other's place.
        """
        if self._ran_out:
            return
        self._ran_out = True
        try:
            self.wanted.folder.mkdir(parents=True, exist_ok=True)
            path = _whole(self.wanted.out_of_memory, _dump_snapshot)
            sys.stderr.write(f"out of memory: the allocator's snapshot is in {path}\n")
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"out of memory: the snapshot was not written: {said}\n")


def _is_done(device: torch.device) -> bool:
    """Return whether a device has finished its work, or has failed, within `PATIENCE_SECONDS`."""

    def wait() -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)  # by name: a new thread has device 0

    waiting = Thread(target=wait, name="profile", daemon=True)
    waiting.start()
    waiting.join(PATIENCE_SECONDS)
    return not waiting.is_alive()


def _dump_snapshot(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))


def _dump_json(content: Any, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _whole(path: Path, dump: Callable[[Path], None]) -> Path:
    """Write a file next to its place and rename it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        dump(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
