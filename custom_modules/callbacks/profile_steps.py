# SPDX-License-Identifier: Apache-2.0
"""Profiles some steps of a training on chosen ranks (`custom_modules.profiling.step_profile`).

Other steps and ranks run as without it. Where a run resumes after the steps, as a requeued job
does, nothing is profiled. If the steps begin with the first of the run, allocations are recorded
from before the model is built; a snapshot at an out-of-memory error is written at any step.

NeMo's own callbacks (`nemo.lightning.pytorch.callbacks`) do not fit: `PytorchProfilerCallback`
runs on every rank, writes an execution trace of all that it sees next to the profile and tells
CUDA's activities to a machine without them; `MemoryProfileCallback` records every step until the
end of training and writes only there, so not at an out-of-memory error; `NsysCallback` has no
ranges of parts, leaves `emit_nvtx` by a second instance of it, and counts steps from 0.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from custom_modules.context_parallel import p2p, ring, ulysses
from custom_modules.profiling.step_profile import StepProfile, Wanted

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
    """Profile steps `first` to `last`, both included, into a folder."""

    def __init__(
        self,
        folder: str,
        first: int,
        last: int,
        ranks: list[int] | None = None,
        shapes: bool = False,
        stack: bool = False,
        nsys: bool = False,
    ) -> None:
        """Take the steps, counted from 1 as in the step log; `ranks` None: every rank."""
        if not 1 <= first <= last:
            raise ValueError(f"steps are {first} to {last}; expected 1 or more, in order")
        self.folder, self.first, self.last, self.ranks = Path(folder), first, last, ranks
        self.how = {"shapes": shapes, "stack": stack, "nsys": nsys}
        self.profile: StepProfile | None = None
        self.begins = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch this rank for an out-of-memory error, if it is a chosen one."""
        rank = trainer.global_rank
        if self.ranks is not None and rank not in self.ranks:
            return
        wanted = Wanted(
            folder=self.folder, first=self.first, last=self.last, rank=rank,
            summary=rank == min(self.ranks or [0]), **self.how,
        )  # fmt: skip
        self.profile = StepProfile(wanted, trainer.strategy.root_device)
        self.profile.watch_for_out_of_memory()
        if self.first == 1:
            self.profile.record_memory()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if the steps have passed."""
        if trainer.global_step >= self.first:
            rank_zero_info(
                f"nothing is profiled: training resumes after step {trainer.global_step}, and the "
                f"steps to profile begin with {self.first}"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step, and the profile before its first one."""
        step = trainer.global_step + 1
        if self.profile is None or not self.first <= step <= self.last:
            return
        if step == self.first:
            chunks = [chunk.module for chunk in trainer.strategy.megatron_parallel]
            optimizer = trainer.strategy.optimizers[0].mcore_optimizer
            self.profile.start(chunks, optimizer, pl_module, EXCHANGE)
        if self.profile.running:
            self.profile.begin(step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """End a step, and the profile after its last one."""
        if self.profile is None or not self.profile.running:
            return
        self.profile.end()
        if trainer.global_step >= self.last:
            self.profile.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what there is if training ends within the steps."""
        self._stop()

    def on_exception(self, *_: Any) -> None:
        """Write what there is if training fails within the steps."""
        self._stop()

    def _stop(self) -> None:
        if self.profile is not None:
            self.profile.stop()
