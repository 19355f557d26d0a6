# SPDX-License-Identifier: Apache-2.0
"""Ends a rank that has not finished a step for too long, and writes the stack of every thread.

A rank that waits in a collective for a lost rank waits until the timeout of the collective, and one
that waits elsewhere (a file system, a data worker, a deadlock) waits forever. The timer is Python's
`faulthandler`: it does not need the interpreter lock, so it fires even if the rank holds it. The
limits are derived from the planned step (`recipes.planner.timeouts`); validation and a checkpoint
fall between two steps.
"""

import faulthandler
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class HangGuard(Callback):
    """Write `FOLDER/rank_N.txt` and exit with 1 if a step does not end in time."""

    def __init__(self, folder: str, first_seconds: int, seconds: int) -> None:
        """Take the folder of the stacks, and the limits of the first step and of the others."""
        for name, value in (("first_seconds", first_seconds), ("seconds", seconds)):
            if value < 1:
                raise ValueError(f"{name} is {value}; the limit is at least 1 second")
        self.folder, self.first_seconds, self.seconds = Path(folder), first_seconds, seconds
        self._file: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the timer: the model is not built yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"rank_{trainer.global_rank}.txt").open("w")
        self._wait(self.first_seconds)

    def on_train_batch_end(self, *_: Any) -> None:
        """Restart the timer for the next step."""
        self._wait(self.seconds)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the timer; a rank that did not hang leaves no file."""
        self._leave()

    def on_exception(self, *_: Any) -> None:
        """Stop the timer if training ends with an error."""
        self._leave()

    def _wait(self, seconds: int) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _leave(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)
            self._file = None
