# SPDX-License-Identifier: Apache-2.0
"""Save the checkpoints of a stage atomically, and resume or start from them.

A checkpoint is a folder `step=N` with NeMo's `weights/` and `context/`. Its completeness marker
`longhaul.json` is written last, after every rank has finished, by write, sync and rename. All our
loaders ignore folders without it, so after a kill at any moment the last complete checkpoint is
used. The marker has the SHA-256 of every file (`recipes.checkpoints.files`).

A save that fails on a rank is abandoned on all: its remains are removed, the newest complete
checkpoint stays, and the training continues. It is tried again at once, then at the next interval.
Only the last save of a training has to succeed.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from megatron.core import parallel_state
from nemo import lightning as nl
from nemo.lightning.ckpt_utils import ckpt_to_dir
from torch.distributed.checkpoint.api import CheckpointException

from custom_modules.checkpoints.safe_loading import require_common
from custom_modules.gpt.rotation import rotation_of
from custom_modules.memory.freed import give_back
from data.files.whole import write_text
from data.store import tokenizer_marker
from recipes.checkpoints.files import FILES, SavedFile, for_marker, require_whole, weights_of
from recipes.checkpoints.marker import (
    MARKER,
    PATTERN,
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
from recipes.checkpoints.record import (
    of_this_process,
    start_entry,
    start_entry_of,
    write_record,
)
from recipes.checkpoints.rotation import rotation_before
from recipes.checkpoints.stored import LAYOUT, require_optimizer
from recipes.checkpoints.verified import LOG, described_by_ranks
from recipes.nemo2 import failed_saves, local_errors
from recipes.nemo2.failed_saves import SaveFailedError

TRIES = 2
"""Attempts at a save before the next interval."""
GIVEN_BACK_EVERY = 50
"""Steps after which freed host memory is given back, besides after each save."""


class StageCheckpoint(nl.ModelCheckpoint):
    """Save every n steps and at the end; keep the newest complete one, several, or all.

    We remove checkpoints ourselves: Lightning forgets earlier ones at a resume and keeps markers.
    """

    def __init__(
        self, keep_all: bool = False, keep_last: int = 1, keep_every: int = 0, **nemo: Any
    ) -> None:
        """Set what to keep: all, or the last few and those at multiples of some steps.

        `nemo` goes to `nl.ModelCheckpoint`.
        """
        if keep_last < 1 or keep_every < 0:
            raise ValueError(
                f"keep_last is {keep_last} and keep_every {keep_every}; keep_last is at least 1, "
                "since the newest checkpoint is always kept, and keep_every at least 0 steps"
            )
        super().__init__(monitor=None, save_top_k=-1, save_last=False, **nemo)
        self.keep_all = keep_all
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._failed = ""
        """Why the last save failed; empty if it did not, or is not finished."""
        self._attempt = 0
        self._again = False
        """Whether a save in the background has failed and is tried again at the end of a step."""
        self._told_of_room = False
        self.save_asked = False
        """Whether a save at the end of this step is asked for; on all ranks (`StopInTime`)."""

    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint, 0 for none."""
        return steps_taken(Path(self.dirpath))

    _last_global_step_saved: int

    def save_now(self, trainer: Trainer) -> None:
        """Save the current step, unless it is saved; every rank must call it."""
        if trainer.global_step != self._last_global_step_saved:
            self._save_none_monitor_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save at the interval, when asked, and after a save in the background has failed.

        Every rank gives freed memory back at the same steps, so that none waits for another.
        """
        super().on_train_batch_end(trainer, *args, **kwargs)
        if self._again or self.save_asked:
            self.save_asked = False
            self.save_now(trainer)
        step = trainer.global_step
        if step % GIVEN_BACK_EVERY == 0 and step != self._last_global_step_saved:
            give_back()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if the interval has not saved it.

        Raises SaveFailedError on all ranks if it cannot be saved.
        """
        super().on_train_end(trainer, pl_module)
        self.save_now(trainer)
        if self.async_save:
            for _ in range(TRIES):
                trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)
                self.save_now(trainer)
            trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)
        if self._failed:
            raise SaveFailedError(
                f"step {trainer.global_step} could not be saved ({self._failed}); the newest "
                f"complete checkpoint is of step {self.newest_step()}: when the cause is mended, "
                "the same command trains the steps after it again"
            )

    def format_checkpoint_name(self, metrics: Any, filename: Any = None, ver: Any = None) -> str:
        """Return the path `step=N`, N the optimizer steps taken (NeMo logs one less)."""
        return str(Path(self.dirpath) / f"step={self._trainer.global_step}.ckpt")

    def setup(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Keep the trainer, whose step names the folder."""
        self._trainer = trainer
        if trainer.is_global_zero:
            of_this_process()  # before the code that trains is edited
        local_errors.record_errors()
        super().setup(trainer, *args, **kwargs)

    @staticmethod
    def set_checkpoint_unfinished_marker(
        checkpoint_path: str | Path, barrier_after: bool = False
    ) -> None:
        """Hide a checkpoint that is being written, as NeMo does; an error is kept for all ranks."""
        try:
            nl.ModelCheckpoint.set_checkpoint_unfinished_marker(checkpoint_path)
        except OSError as error:
            local_errors.record(ckpt_to_dir(checkpoint_path), error)
        if barrier_after:
            dist.barrier()

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Save; after a failure once more. One in the background is tried again at a later step."""
        self._attempt = self._attempt + 1 if self._again else 1
        self._again = False
        self._try(trainer, filepath)
        give_back()
        if self._again and not self.async_save:
            self._save_checkpoint(trainer, filepath)

    def _try(self, trainer: Trainer, filepath: str) -> None:
        checkpoints = Path(self.dirpath)
        if trainer.is_global_zero:
            finding = failed_saves.too_full(checkpoints)
            if finding is not None and not self._told_of_room:
                failed_saves.tell(checkpoints.parent, trainer.global_step, finding)
            self._told_of_room = finding is not None
        folder, why = Path(ckpt_to_dir(filepath)), None
        try:
            checkpoints.parent.stat()  # else the folder of a file system that is gone
            checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            why = failed_saves.reason([error])
        if (found := _first(why)) is not None:
            self._abandon(trainer, folder, trainer.global_step, *found)
            return
        try:
            super()._save_checkpoint(trainer, filepath)
        except CheckpointException as error:  # torch raises it on all ranks
            if (found := _first(failed_saves.reason([error]))) is not None:
                self._abandon(trainer, folder, trainer.global_step, *found)

    def _abandon(self, trainer: Trainer, folder: Path, step: int, said: str, full: bool) -> None:
        """Remove the remains of a failed save and say so; on every rank."""
        self._failed, self._again = said, self._attempt < TRIES
        local_errors.start_over()
        if self._last_global_step_saved == step:
            self._last_global_step_saved = 0
        if self.deferred_ckpts_to_remove:  # one list for each save in the background
            self.deferred_ckpts_to_remove.pop(0)
        if trainer.is_global_zero:
            later = "at the end of a step" if self.async_save else "now"
            last = trainer.should_stop or 0 < trainer.max_steps <= step
            then = "the training fails if its last save does" if last else "the training continues"
            again = f"it is tried again {later}" if self._again else then
            finding = failed_saves.failure(folder, said, full, again)
            _remove_part(folder)
            failed_saves.tell(folder.parents[1], step, finding)
        dist.barrier()

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
                _write_layout(folder)
                _write_record(folder, trainer, global_step)
            why = _first(failed_saves.reason(local_errors.take(folder)))
            if why is None:
                try:
                    files = described_by_ranks(folder)
                    mine = None
                    if trainer.is_global_zero:
                        mine = _marked(folder, trainer, global_step, files)
                    why = _first(mine)
                except OSError as error:
                    why = failed_saves.reason([error])
            if why is not None:
                self._abandon(trainer, folder, global_step, *why)
                return
            finalize()
            self._failed = ""
            if trainer.is_global_zero and not self.keep_all and is_marked(folder):
                with suppress(OSError):  # the next save removes what is left
                    _remove_others(folder, self.keep_last, self.keep_every)

        return mark_and_finalize


def _write_layout(folder: Path) -> None:
    """Write what wrote a checkpoint: ranks and the sizes of the kinds of parallelism."""
    layout = {
        "ranks": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }
    try:
        write_text(folder / LAYOUT, json.dumps(layout))
    except OSError as error:
        local_errors.record(folder, error)


def _marked(
    folder: Path, trainer: Trainer, step: int, files: dict[str, SavedFile]
) -> tuple[str, bool] | None:
    """Write the marker of a checkpoint that can be read; return why it was not written, or None.

    torch does not notice every error of a full disk.
    """
    try:
        require_whole(folder)
        require_common(weights_of(folder) / "common.pt")
        _write_marker(folder, trainer, step, files)
    except (OSError, ValueError) as error:
        return failed_saves.reason([error])
    return None


def _first(mine: tuple[str, bool] | None) -> tuple[str, bool] | None:
    """Return the first reason that a rank has for a failed save; on every rank."""
    everyone: list[tuple[str, bool] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((why for why in everyone if why is not None), None)


def _remove_part(folder: Path) -> None:
    """Remove what a failed save has written; what cannot be removed stays hidden."""
    with suppress(OSError):
        (folder / MARKER).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.with_name(folder.name + "-unfinished").unlink(missing_ok=True)


def _write_marker(folder: Path, trainer: Trainer, step: int, files: dict[str, SavedFile]) -> None:
    """Write the facts that a later stage, an evaluation and an export need."""
    config = trainer.lightning_module.config
    marker = {
        "step": step,
        "max_steps": trainer.max_steps,
        "seq_length": config.seq_length,
        "rope": config.rope.to_dict(),
        **({} if config.pattern is None else {PATTERN: config.pattern.to_dict()}),
        "temperature": config.rope.temperature,
        ROTATION: rotation_of(trainer.strategy.megatron_parallel, config.seq_length).to_dict(),
        **tokenizer_marker(trainer.datamodule.manifest.tokenizer),
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
            start=trainer.strategy.started_from,
        )
    except (OSError, ValueError) as error:
        LOG.warning("%s has no record of how it was made: %s", folder, error)


def _remove_others(newest: Path, keep_last: int = 1, keep_every: int = 0) -> None:
    """Remove the checkpoints before the newest that are not kept, each time its marker first."""
    others = {
        int(folder.name.removeprefix("step=")): folder
        for folder in newest.parent.glob("step=*")
        if folder != newest and is_marked(folder)
    }
    kept = sorted(others)[max(0, len(others) - (keep_last - 1)) :]
    for step, folder in others.items():
        if step not in kept and not (keep_every and step % keep_every == 0):
            (folder / MARKER).unlink()
            shutil.rmtree(folder)


@dataclass(kw_only=True)
class StageResume(nl.AutoResume):
    """Resume this stage from its newest complete checkpoint; otherwise start from `start`.

    `start` is a folder of checkpoints (or one checkpoint). Weights are loaded from it, and with
    `optimizer` "carried" the optimizer's state; the schedule always starts anew.
    """

    start: Optional[str] = None  # noqa: UP045 - nemo-run 0.11.1 cannot parse `str | None`
    optimizer: Literal["new", "carried"] = "new"
    verify: bool = True
    """Whether the checksums of the files are verified when they are read."""

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Set the checkpoint that the trainer loads; raise ValueError if `start` does not fit."""
        read = resumed = self._find_trainer_ckpt_path()
        if self.start is not None and read is None:
            read = start_checkpoint(Path(self.start))
            if self.optimizer == "carried":
                require_optimizer(read)
            self.restore_config = nl.RestoreConfig(
                path=str(read),
                load_model_state=True,
                load_optim_state=self.optimizer == "carried",
                load_artifacts=False,  # the tokenizer is from the store; an import has no context
            )
        if read is not None and model is not None:
            require_vocabulary(read, model.config.vocab_size)
            rotation_before(read)
        trainer.strategy.verify_checkpoints = self.verify
        trainer.strategy.started_from = self._started_from(resumed)
        super().setup(trainer, model)

    def _started_from(self, resumed: Path | None) -> dict[str, Any]:
        """Return what records say of the start: at a resume, what that checkpoint's says."""
        if resumed is not None:
            return start_entry_of(resumed)
        return start_entry(None if self.restore_config is None else Path(self.restore_config.path))

    def _find_trainer_ckpt_path(self) -> Path | None:
        assert self.resume_from_directory is not None
        return newest_checkpoint(Path(self.resume_from_directory))
