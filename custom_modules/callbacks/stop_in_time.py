# SPDX-License-Identifier: Apache-2.0
"""Save and stop at the end of a step when the scheduler says that the job is about to end.

SIGTERM is what a preemption sends, SIGUSR1 what a job asks its scheduler for some minutes before
its time limit. Any rank may get it, alone: the ranks agree once a step (an all-reduce of one
number), so that all stop after the same one. The checkpoint is the one that a stage writes at its
end; the same stage, run again, goes on from it.

Lightning's own handling of SIGTERM ends ranks between the forward and the step, each for itself.
"""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopInTime(Callback):
    """Stop after the step in which a rank was told to; `stopped` is then that step."""

    def __init__(self) -> None:
        """Start untold."""
        self.told: str | None = None
        self.stopped: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen; what listened before does again when training ends."""
        for which in SIGNALS:
            self._before[which] = signal.signal(which, self._hear)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Agree, and let training end where one was told; without another validation."""
        if waiting := signal.sigpending() & set(SIGNALS):  # where a launcher has blocked them
            self.told = signal.Signals(min(waiting)).name
            # No wait without an end: a thread that has not blocked it may have taken it by now.
            signal.sigtimedwait(waiting, 0)
        told = torch.tensor(int(self.told is not None), device=torch.cuda.current_device())
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if not told or trainer.global_step >= trainer.max_steps:
            return
        rank_zero_info(f"told to stop ({self.told or 'by another rank'}); saving")
        self.stopped = trainer.global_step
        trainer.limit_val_batches = 0
        trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the signals back."""
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before.clear()

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.told = signal.Signals(signum).name
