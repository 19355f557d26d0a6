# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted in a real training, each as a callback on its ranks.

`plant` adds one to the callbacks that the health of a stage is checked with; nothing else of the
training is changed.
"""

import os
import shutil
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import nemo_run
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from megatron.core.datasets.utils import Split

from data.nemo_module import NumberedDataset

RANK = 1
"""The rank that is slow, waits for data, or keeps memory."""
FROM_STEP = 4
LEAK_BYTES = 16 * 2**20
LEFT_BYTES = 2 * 2**20
"""Bytes that a filled disk has left: logs can be written, a checkpoint cannot."""
ASCENT = -8e-5
"""Learning rate of a divergence: steps go up the gradient, slowly."""
STALL_SECONDS = 3.0


class SlowRank(Callback):
    """One rank takes twice as long for its forward passes."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait after each forward."""
        if trainer.global_rank != RANK:
            return
        began = [0.0]
        model: Any = pl_module.module
        model.register_forward_pre_hook(lambda *_: began.__setitem__(0, time.perf_counter()))
        model.register_forward_hook(
            lambda *_: time.sleep(max(0.3, 2 * (time.perf_counter() - began[0])))
        )


class NanSample(Callback):
    """One training sample has no number for a loss, whichever rank reads it."""

    def __init__(self, sample: int) -> None:
        """Take the place of the sample in the data, which is its number in a first attempt."""
        self.sample = sample

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change what is read."""

        def change(sample: dict[str, torch.Tensor], number: int) -> None:
            if number == self.sample:
                sample["loss_mask"] = torch.full_like(sample["loss_mask"], torch.nan)

        _after_reading(change)


class DataStall(Callback):
    """One rank's reader of data waits before each sample."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change how it reads; readers are processes that inherit it."""
        if trainer.global_rank == RANK:
            _after_reading(
                lambda _, number: time.sleep(STALL_SECONDS if number >= 2 * FROM_STEP else 0.0)
            )


class Leak(Callback):
    """One rank keeps some memory of each step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start with nothing."""
        self.kept: list[bytes] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Keep more; random bytes are not shared pages."""
        if trainer.global_rank == RANK:
            self.kept.append(os.urandom(LEAK_BYTES))


class Divergence(Callback):
    """After some steps the optimizer goes up the gradient, slowly."""

    def __init__(self, step: int) -> None:
        """Take the last sound step."""
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Turn the rate of the step around; the step log has noted the schedule's."""
        if trainer.global_step >= self.step:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = ASCENT


class FullDisk(Callback):
    """The file system of the run fills up before a save."""

    def __init__(self, folder: str) -> None:
        """Take a folder on it."""
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Write a file that leaves less than a checkpoint takes."""
        if trainer.global_step == FROM_STEP and trainer.is_global_zero:
            size = shutil.disk_usage(self.folder).free - LEFT_BYTES
            with (Path(self.folder) / "ballast").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, size))


class LostFolder(Callback):
    """The run folder vanishes, as a file system that is unmounted."""

    def __init__(self, run: str) -> None:
        """Take the run folder."""
        self.run = run

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Move it away while ranks hold files in it."""
        if trainer.global_step == FROM_STEP and trainer.is_global_zero:
            os.rename(self.run, f"{self.run}.away")


FAULTS: dict[str, type[Callback]] = {
    fault.__name__: fault
    for fault in (SlowRank, NanSample, DataStall, Leak, Divergence, FullDisk, LostFolder)
}


def plant(module: ModuleType, name: str, arguments: dict[str, Any]) -> None:
    """Have `check_health` of `longhaul.jobs.watched_training` add a fault after its callbacks."""
    check = module.check_health

    def check_and_plant(recipe: nemo_run.Partial, alert: str = "") -> None:
        check(recipe, alert)
        recipe.trainer.callbacks.append(nemo_run.Config(FAULTS[name], **arguments))

    module.check_health = check_and_plant  # type: ignore[attr-defined]


def _after_reading(change: Any) -> None:
    """Call a function with each training sample that is read, and its place in the data."""
    read = NumberedDataset.__getitem__

    def changed(self: NumberedDataset, idx: int | None) -> dict[str, torch.Tensor]:
        sample = read(self, idx)
        if idx is not None and self.index_split == Split.train:
            change(sample, self.place_of(idx))
        return sample

    NumberedDataset.__getitem__ = changed  # type: ignore[method-assign]
