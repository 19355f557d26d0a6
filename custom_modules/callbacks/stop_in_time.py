# SPDX-License-Identifier: Apache-2.0
"""Save, or save and stop, at the end of a step when a signal or a file asks for it.

A preemption sends SIGTERM; SIGUSR1 is requested by the job from its scheduler, some minutes before
the time limit. A single rank may get it, so the ranks agree once a step (an all-reduce of one
number) and all stop after the same step. The checkpoint is the one that a stage writes at its end;
the same stage, run again, resumes from it.

A file named `save` or `stop` in the folder of the stage or of the run asks for the same, from any
machine: `save` for a checkpoint at the end of the step, `stop` for one after which training ends.
The first rank looks once a step, and removes the file when the ranks have agreed on it.

Lightning's own handling of SIGTERM ends ranks between the forward and the step, each for itself.
"""

import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAVE, STOP = "save", "stop"
"""Names of the files that ask for it."""
_NOTHING, _SAVE, _STOP = range(3)


class StopInTime(Callback):
    """Stop after the step in which a rank received a signal; `stopped` is then that step.

    `stopped_by` is the file that asked for it, on the first rank, also if a signal came in the same
    step; empty for a signal alone.
    """

    def __init__(self) -> None:
        """Start without a signal received."""
        self.told: str | None = None
        self.stopped: int | None = None
        self.stopped_by = ""
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
        files = trigger_files(trainer) if dist.get_rank() == 0 else []
        asked = _STOP if self.told or any(file.name == STOP for file in files) else _NOTHING
        asked = asked or (_SAVE if files else _NOTHING)
        agreed = torch.tensor(asked, device=torch.cuda.current_device())
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        asked = int(agreed)
        if asked == _NOTHING or trainer.global_step >= trainer.max_steps:
            return
        for file in files:
            with suppress(OSError):
                file.unlink()
        why = ", ".join(map(str, files)) or self.told or "by another rank"
        if asked == _SAVE:
            rank_zero_info(f"saving, as {why} asks")
            trainer.checkpoint_callback.save_asked = True  # other callbacks judge the step first
            return
        self.stopped_by = next((str(file) for file in files if file.name == STOP), "")
        rank_zero_info(f"told to stop ({self.stopped_by or self.told or why}); saving")
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


def trigger_files(trainer: Trainer) -> list[Path]:
    """Return the files that ask for a save or a stop, in the folders of the stage and its run."""
    checkpoints = getattr(getattr(trainer, "checkpoint_callback", None), "dirpath", None)
    if checkpoints is None:
        return []
    stage = Path(checkpoints).parent
    folders = [stage, stage.parents[1]] if stage.parent.name == "stages" else [stage]
    places = [folder / name for folder in folders for name in (SAVE, STOP)]
    return [place for place in places if place.is_file()]
