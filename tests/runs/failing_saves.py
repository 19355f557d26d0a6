# SPDX-License-Identifier: Apache-2.0
"""A callback that lets saves of a training fail, each in a way that a machine can fail."""

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, Trainer

from tests.conditions import until

LARGEST = 1 << 20
"""Bytes of a file: less than that of a rank's weights, more than a log."""


class FailingSaves(Callback):
    """After step 5 and from step 20 on rank 1 cannot write large files, after step 10 the disk of
    rank 0 is full at the first attempt, after step 15 a process that writes for rank 1 is killed.
    """

    def on_train_batch_start(self, *_: Any) -> None:
        """Let large files be written again."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Prepare the failure of the save that follows."""
        step, rank = trainer.global_step, trainer.global_rank
        if step in (5, 20) and rank == 1:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, hard))
        weights = Path(trainer.checkpoint_callback.dirpath, f"step={step}", "weights")
        if step == 10 and rank == 0:
            weights.mkdir(parents=True)
            for name in (".metadata.tmp", "..metadata.tmp"):  # torch's, multistorageclient's
                (weights / name).symlink_to("/dev/full")
        if step == 15 and rank == 1:
            weights.mkdir(parents=True, exist_ok=True)
            for name in ("__1_0.distcp", ".__1_0.distcp.tmp"):
                os.mkfifo(weights / name)  # who opens it waits for a reader
            before = {child.pid for child in psutil.Process().children()}
            threading.Thread(target=kill_writer, args=(before,)).start()


def kill_writer(but: set[int]) -> None:
    """Kill the child process that waits, of those that are not there yet."""
    until(lambda: {child.pid for child in psutil.Process().children()} - but)
    time.sleep(2)  # the others have written by then
    for child in psutil.Process().children(recursive=True):
        if child.pid not in but:
            child.kill()
