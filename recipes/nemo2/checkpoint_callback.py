# SPDX-License-Identifier: Apache-2.0
"""Save the checkpoints of a stage atomically, and resume or start from them.

A checkpoint is a folder `step=N` with NeMo's `weights/` and `context/`. Its completeness marker
`longhaul.json` is written last, after every rank has finished, by write, sync and rename. All our
loaders ignore folders without it, so after a kill at any moment the last complete checkpoint is
used. The marker has the SHA-256 of every file (`recipes.checkpoints.files`).
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from nemo import lightning as nl
from nemo.lightning.ckpt_utils import ckpt_to_dir

from custom_modules.gpt.rotation import rotation_of
from recipes.checkpoints.files import FILES, SavedFile, for_marker
from recipes.checkpoints.marker import (
    MARKER,
    ROTATION,
    TRAINED_ON,
    VOCABULARY,
    is_marked,
    newest_checkpoint,
    require_vocabulary,
    start_checkpoint,
    steps_taken,
    write_marker,
)
from recipes.checkpoints.reproduction import write_record
from recipes.checkpoints.rotation import rotation_before
from recipes.checkpoints.surroundings import of_this_process
from recipes.checkpoints.verified import LOG, described_by_ranks


class StageCheckpoint(nl.ModelCheckpoint):
    """Save every n steps and at the end; keep the newest complete one, or all.

    We remove checkpoints ourselves: Lightning forgets earlier ones at a resume and keeps markers.
    """

    def __init__(self, keep_all: bool = False, **nemo: Any) -> None:
        """Set what to keep; `nemo` goes to `nl.ModelCheckpoint`."""
        super().__init__(monitor=None, save_top_k=-1, save_last=False, **nemo)
        self.keep_all = keep_all

    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint, 0 for none."""
        return steps_taken(Path(self.dirpath))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if the interval has not saved it."""
        super().on_train_end(trainer, pl_module)
        if trainer.global_step != self._last_global_step_saved:
            self._save_none_monitor_checkpoint(trainer, self._monitor_candidates(trainer))

    def format_checkpoint_name(self, metrics: Any, filename: Any = None, ver: Any = None) -> str:
        """Return the path `step=N`, N the optimizer steps taken (NeMo logs one less)."""
        return str(Path(self.dirpath) / f"step={self._trainer.global_step}.ckpt")

    def setup(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Keep the trainer, whose step names the folder."""
        self._trainer = trainer
        if trainer.is_global_zero:
            of_this_process()  # before the code that trains is edited
        super().setup(trainer, *args, **kwargs)

    def _get_finalize_save_checkpoint_callback(
        self, trainer: Trainer, filepath: str, global_step: int
    ) -> Any:
        """Return the marker's writer followed by NeMo's finalizer.

        NeMo's `-unfinished` sibling hides the checkpoint until all ranks have synchronised in the
        finalizer; then the old one is removed.
        """
        finalize = super()._get_finalize_save_checkpoint_callback(trainer, filepath, global_step)

        def mark_and_finalize() -> None:
            folder = Path(ckpt_to_dir(filepath))
            if trainer.is_global_zero:
                _write_record(folder, trainer, global_step)
            files = described_by_ranks(folder)
            if trainer.is_global_zero:
                _write_marker(folder, trainer, global_step, files)
            finalize()
            if trainer.is_global_zero and not self.keep_all:
                _remove_others(folder)

        return mark_and_finalize


def _write_marker(folder: Path, trainer: Trainer, step: int, files: dict[str, SavedFile]) -> None:
    """Write the facts that a later stage, an evaluation and an export need."""
    config = trainer.lightning_module.config
    marker = {
        "step": step,
        "max_steps": trainer.max_steps,
        "seq_length": config.seq_length,
        "rope": config.rope.to_dict(),
        "temperature": config.rope.temperature,
        ROTATION: rotation_of(trainer.strategy.megatron_parallel, config.seq_length).to_dict(),
        "tokenizer": trainer.datamodule.manifest.tokenizer.fingerprint,
        TRAINED_ON: trainer.datamodule.manifest.train_sha256,
        VOCABULARY: config.vocab_size,
        FILES: for_marker(files),
    }
    write_marker(folder, marker)


def _write_record(folder: Path, trainer: Trainer, step: int) -> None:
    """Write with what the checkpoint can be made again; if that fails it is saved without."""
    try:
        write_record(
            folder,
            stage=Path(trainer.checkpoint_callback.dirpath).parent,
            step=step,
            ranks=trainer.world_size,
            store=Path(trainer.datamodule.store),
            train_sha256=trainer.datamodule.manifest.train_sha256,
        )
    except (OSError, ValueError) as error:
        LOG.warning("%s has no record of how it was made: %s", folder, error)


def _remove_others(newest: Path) -> None:
    """Remove the checkpoints before the newest, each time its marker first."""
    for folder in newest.parent.glob("step=*"):
        if folder != newest and is_marked(folder):
            (folder / MARKER).unlink()
            shutil.rmtree(folder)


@dataclass(kw_only=True)
class StageResume(nl.AutoResume):
    """Resume this stage from its newest complete checkpoint; otherwise start from `start`.

    `start` is a folder of checkpoints (or one checkpoint). Only weights are loaded from it;
    optimizer and schedule start anew.
    """

    start: Optional[str] = None  # noqa: UP045 - nemo-run 0.11.1 cannot parse `str | None`
    verify: bool = True
    """Whether the checksums of the files are verified when they are read."""

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Set the checkpoint that the trainer loads; raise ValueError if `start` does not fit."""
        read = self._find_trainer_ckpt_path()
        if self.start is not None and read is None:
            read = start_checkpoint(Path(self.start))
            self.restore_config = nl.RestoreConfig(
                path=str(read),
                load_model_state=True,
                load_optim_state=False,
                load_artifacts=False,  # the tokenizer is from the store; an import has no context
            )
        if read is not None and model is not None:
            require_vocabulary(read, model.config.vocab_size)
            rotation_before(read)
        trainer.strategy.verify_checkpoints = self.verify
        super().setup(trainer, model)

    def _find_trainer_ckpt_path(self) -> Path | None:
        assert self.resume_from_directory is not None
        return newest_checkpoint(Path(self.resume_from_directory))
