# SPDX-License-Identifier: Apache-2.0
"""End a rank that ends no step for too long, and leave every thread's stack.

A rank that waits in a collective for one that is lost waits until the collective's own timeout,
and one that waits elsewhere (a file system, a data worker, a deadlock) for ever. The timer is
Python's `faulthandler`: it needs no interpreter lock, so it fires in a rank that holds it. The
limits follow from the planned step (`recipes.planner.timeouts`); validation and a checkpoint fall
between two steps.
"""

import faulthandler
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class HangGuard(Callback):
    """Write `FOLDER/rank_N.txt` and exit with 1 where a step does not end in time."""

    def __init__(self, folder: str, first_seconds: int, seconds: int) -> None:
        """Take where stacks go, and the limits of the first step and of the others."""
        for name, value in (("first_seconds", first_seconds), ("seconds", seconds)):
            if value < 1:
                raise ValueError(f"{name} is {value}; a rank hangs after at least 1 second")
        self.folder, self.first_seconds, self.seconds = Path(folder), first_seconds, seconds
        self._file: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start waiting: the model is not built yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"rank_{trainer.global_rank}.txt").open("w")
        self._wait(self.first_seconds)

    def on_train_batch_end(self, *_: Any) -> None:
        """Wait for the next."""
        self._wait(self.seconds)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop waiting; a rank that did not hang leaves no file."""
        self._leave()

    def on_exception(self, *_: Any) -> None:
        """Stop waiting where training ends by an error."""
        self._leave()

    def _wait(self, seconds: int) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _leave(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)
            self._file = None
