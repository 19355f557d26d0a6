# SPDX-License-Identifier: Apache-2.0
"""Profiles some steps of a training on chosen ranks, by `torch.profiler` or for Nsight Systems.

    FOLDER/rank_0_steps_5_to_8.pt.trace.json.gz    Chrome trace, for Perfetto
    FOLDER/rank_0_steps_5_to_8.table.txt           torch's table of operators and ranges
    FOLDER/rank_0_steps_5_to_8.parts.json          times of the parts, exposed communication
    FOLDER/rank_0_steps_5_to_8.memory.pickle       snapshot of CUDA's allocator, for memory_viz
    FOLDER/rank_0_steps_5_to_8.memory.json         on CPU: bytes by category, of the last step
    FOLDER/rank_0_out_of_memory.pickle             the snapshot at an out-of-memory error

Other steps and ranks run as without it. Where a run resumes after the first of the steps, as a
requeued job does, nothing is profiled. If the steps begin with the first of the run, allocations
are recorded from before the model is built; a snapshot at an out-of-memory error is written at any
step. A training that fails within the steps leaves no trace: to end one has to wait for the
device, which may wait for another rank.

NeMo's own callbacks (`nemo.lightning.pytorch.callbacks`) do not fit: `PytorchProfilerCallback`
runs on every rank and tells CUDA's activities to a machine without them; `MemoryProfileCallback`
records every step until the end of training and writes only there; `NsysCallback` has no ranges
of parts, and counts steps from 0.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from custom_modules.context_parallel import p2p, ring, ulysses
from custom_modules.profiling.categories import Category
from custom_modules.profiling.memory_by_category import MemoryByCategory
from custom_modules.profiling.step_memory import named_parts as named_memory
from custom_modules.profiling.step_memory import state_bytes
from custom_modules.profiling.step_parts import named_parts, part_times

HISTORY = 1_000_000
"""Allocations and frees that a memory snapshot keeps at most; each takes a KB or two of host
memory, mostly for its stack."""
ROWS = 20
"""Operators in the table."""
EXCHANGE = (
    (ring, "post", "exchange post"),
    (ulysses, "post", "exchange post"),
    (p2p.Messages, "wait", "exchange wait"),
)
"""Context parallelism's messages: started, and waited for.

They are of ring, Ulysses and the kinds that combine them; Transformer Engine's own kinds exchange
inside its kernel and show in the timeline as NCCL's operators only. With gloo the host itself waits
for a message; on CUDA the stream waits, and the host continues.
"""


class ProfileSteps(Callback):
    """Profile steps `first` to `last`, both included, into a folder.

    With `nsys` the ranges of PyTorch's operators and of the parts go to Nsight Systems, and no
    trace is written: CUPTI, which times kernels, serves one of them.
    """

    def __init__(
        self,
        folder: str,
        first: int,
        last: int,
        ranks: list[int] | None = None,
        nsys: bool = False,
    ) -> None:
        """Take the steps, counted from 1 as in the step log; `ranks` None: every rank."""
        if not 1 <= first <= last:
            raise ValueError(f"steps are {first} to {last}; expected 1 or more, in order")
        self.folder, self.first, self.last, self.ranks = Path(folder), first, last, ranks
        self._of_steps = f"steps_{first}_to_{last}"
        self.nsys, self.chosen, self.on_cuda, self.rank = nsys, False, False, 0
        self.profiler: torch.profiler.profile | None = None
        self.memory: MemoryByCategory | None = None
        self._state: dict[Category, int] = {}
        self._ran_out = False
        self._steps, self._step = ExitStack(), ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch this rank for an out-of-memory error, if it is a chosen one."""
        self.rank = trainer.global_rank
        self.chosen = self.ranks is None or self.rank in self.ranks
        self.on_cuda = trainer.strategy.root_device.type == "cuda"
        if self.chosen and self.on_cuda:
            torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._write_out_of_memory())  # type: ignore[attr-defined]  # in builds with CUDA
            if self.first == 1:
                self._record_memory()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps, or say so if the steps have passed."""
        before = self.first - 1 - trainer.global_step
        if before < 0:
            self.chosen = False
            rank_zero_info(
                f"nothing is profiled: training resumes after step {trainer.global_step}, and the "
                f"steps to profile begin with {self.first}"
            )
        elif self.chosen and not self.nsys:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self.on_cuda else []
            warmup = min(before, 1)
            self.profiler = torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(
                    wait=before - warmup, warmup=warmup, active=self.last - self.first + 1, repeat=1
                ),
                on_trace_ready=self._write_trace,
            )
            self.profiler.start()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open the ranges of a step, and before the first one those of its parts."""
        step = trainer.global_step + 1
        if not self.chosen or not self.first <= step <= self.last:
            return
        chunks = [chunk.module for chunk in trainer.strategy.megatron_parallel]
        optimizer = trainer.strategy.optimizers[0].mcore_optimizer
        if step == self.first:
            if self.on_cuda:
                self._record_memory()
            if self.nsys:
                self._steps.enter_context(torch.cuda.profiler.profile())
                self._steps.enter_context(torch.autograd.profiler.emit_nvtx())
            self._steps.enter_context(named_parts(chunks, optimizer, pl_module, others=EXCHANGE))
        if step == self.last and not self.on_cuda:
            self._state = state_bytes(chunks, optimizer)
            self._step.enter_context(named_memory(chunks))
            self.memory = self._step.enter_context(MemoryByCategory())
        self._step.enter_context(torch.profiler.record_function(f"step {step}"))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Close the ranges of a step, and after the last one write what was recorded."""
        self._step.close()
        if self.chosen and trainer.global_step == self.last:
            self._steps.close()
            self._write_memory()
        if self.profiler is not None:
            self.profiler.step()  # calls `_write_trace` after the last step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the trace and the memory if training ends within the steps."""
        self._steps.close()
        if self.chosen and self.first <= trainer.global_step < self.last:
            self._write_memory()
        if self.profiler is not None:
            self.profiler.stop()

    def _record_memory(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")

    def _write(self, kind: str, dump: Callable[[Path], Any]) -> None:
        """Write a file; a disk or a host memory that refuses it stops no training."""
        path = self.folder / f"rank_{self.rank}_{kind}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            dump(path)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"profile: {path} was not written: {said}\n")

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        by = f"self_{'cuda' if self.on_cuda else 'cpu'}_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=ROWS)
        rows, exposed = part_times(profiler.events() or ())
        parts = {"exposed_communication_seconds": exposed, "parts": rows}
        self._write(f"{self._of_steps}.parts.json", partial(_dump_json, parts))
        self._write(f"{self._of_steps}.table.txt", lambda path: path.write_text(table))
        trace = f"{self._of_steps}.pt.trace.json.gz"
        self._write(trace, lambda path: profiler.export_chrome_trace(str(path)))
        if self.rank == min(self.ranks or [0]):
            sys.stderr.write(f"{table}\n")

    def _write_memory(self) -> None:
        """Write the snapshot of the allocator, or on CPU the bytes of the last step."""
        if self.on_cuda:
            self._write(f"{self._of_steps}.memory.pickle", _dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
        elif self.memory is not None:
            counted = {
                "rank": self.rank,
                "step": self.last,
                "state_bytes": self._state,
                "peak_bytes": self.memory.peak_bytes + sum(self._state.values()),
                "step_peak_bytes": self.memory.peak_bytes,
                "at_peak_bytes": self.memory.at_peak,
                "most_bytes": self.memory.most,
            }
            self._write(f"{self._of_steps}.memory.json", partial(_dump_json, counted))

    def _write_out_of_memory(self) -> None:
        """Write the first such snapshot; an error here would be raised in the other's place."""
        if not self._ran_out:
            self._ran_out = True
            self._write("out_of_memory.pickle", _dump_snapshot)


def _dump_snapshot(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))


def _dump_json(content: Any, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
