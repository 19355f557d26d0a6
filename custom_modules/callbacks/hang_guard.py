# SPDX-License-Identifier: Apache-2.0
"""Ends a rank that has not finished a step for too long, and writes the stack of every thread.

A rank that waits in a collective for a lost rank waits until the timeout of the collective, and one
that waits elsewhere (a file system, a data worker, a deadlock) waits forever. The timer is Python's
`faulthandler`: it does not need the interpreter lock, so it fires even if the rank holds it. The
limits are derived from the planned step (`recipes.planner.timeouts`); validation and a checkpoint
fall between two steps.

Shortly before the limit, a helper process of the rank (`stack_dumper`) also writes the stacks of
C++ code and of the rank's child processes to `rank_N_pyspy.txt`, with py-spy. If ptrace is not
permitted, that file says so, and only Python's stacks are available.
"""

import contextlib
import ctypes
import faulthandler
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from custom_modules.callbacks import stack_dumper

EARLY_SECONDS = 60.0
"""How long before the limit the stacks are written by py-spy; at most half of the limit."""
PR_SET_PTRACER = 0x59616D61
"""prctl(2): names the process that may read this one where Yama restricts ptrace."""


class HangGuard(Callback):
    """Write `FOLDER/rank_N.txt` and exit with 1 if a step does not end in time."""

    def __init__(self, folder: str, first_seconds: int, seconds: int) -> None:
        """Take the folder of the stacks, and the limits of the first step and of the others."""
        for name, value in (("first_seconds", first_seconds), ("seconds", seconds)):
            if value < 1:
                raise ValueError(f"{name} is {value}; the limit is at least 1 second")
        self.folder, self.first_seconds, self.seconds = Path(folder), first_seconds, seconds
        self._file: Any = None
        self._dumper: subprocess.Popen[bytes] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the timer: the model is not built yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"rank_{trainer.global_rank}.txt").open("w")
        self._dumper = dumper(self._pyspy_file)
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

    @property
    def _pyspy_file(self) -> Path:
        path = Path(self._file.name)
        return path.with_name(f"{path.stem}_pyspy.txt")

    def _wait(self, seconds: int) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)
        if self._dumper is not None and self._dumper.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, or is writing
                self._dumper.stdin.write(f"{early(seconds):g}\n".encode())

    def _leave(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._dumper is not None and self._dumper.stdin is not None:
            self._dumper.kill()
            self._dumper.wait()
            self._dumper.stdin.close()
            self._dumper = None
        if self._file is not None:
            self._file.close()
            self._pyspy_file.unlink(missing_ok=True)
            Path(self._file.name).unlink(missing_ok=True)
            self._file = None


def early(seconds: float) -> float:
    """Return how long a step may take before its rank is taken to hang, and its stacks written."""
    return seconds - min(EARLY_SECONDS, seconds / 2)


def dumper(file: Path) -> "subprocess.Popen[bytes] | None":
    """Start the process that writes this rank's stacks to a file; None without py-spy.

    It is in a session of its own, since Ctrl-C is for the ranks.
    """
    installed = Path(sys.executable).with_name("py-spy")
    program = str(installed) if installed.is_file() else shutil.which("py-spy")
    if program is None:
        return None
    file.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", stack_dumper.__file__, str(os.getpid()), str(file), program],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, process.pid, 0, 0, 0)  # an error where Yama is not
    return process
