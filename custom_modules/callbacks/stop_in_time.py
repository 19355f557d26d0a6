# SPDX-License-Identifier: Apache-2.0
"""Save and stop at the end of a step when the scheduler says that the job is about to end.

A preemption sends SIGTERM; SIGUSR1 is requested by the job from its scheduler, some minutes before
the time limit. A single rank may get it, so the ranks agree once a step (an all-reduce of one
number) and all stop after the same step. The checkpoint is the one that a stage writes at its end;
the same stage, run again, resumes from it.

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
    """Stop after the step in which a rank received a signal; `stopped` is then that step."""

    def __init__(self) -> None:
        """Start without a signal received."""
        self.told: str | None = None
        self.stopped: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers; `teardown` restores the previous ones."""
        for which in SIGNALS:
            self._before[which] = signal.signal(which, self._hear)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Agree among ranks, and end training without a validation if any received a signal."""
        if waiting := signal.sigpending() & set(SIGNALS):  # where a launcher has blocked them
            self.told = signal.Signals(min(waiting)).name
            # Without blocking: a thread that has not blocked the signal may have taken it by now.
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
        """Restore the signal handlers."""
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before.clear()

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.told = signal.Signals(signum).name
