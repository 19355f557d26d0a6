# SPDX-License-Identifier: Apache-2.0
"""Checks that the places a resolved recipe writes to are writable and have room for checkpoints.

Otherwise an unwritable or small file system would only fail at a checkpoint, hours into a stage.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import nemo_run

from data.files.writable import require_file, require_folder
from recipes.checkpoints.marker import newest_checkpoint
from recipes.planner.timeouts import SAVED_BYTES
from recipes.resolved.stage import ResolvedStage
from recipes.spec.model_card import ModelCard


def require_places(recipe: nemo_run.Partial) -> None:
    """Raise ValueError, with the key, for a place of the recipe that is not writable.

    A checkpoint folder that a resumed run would not read is refused as well.
    """
    saves, resumes = recipe.log.ckpt.dirpath, recipe.resume.resume_from_directory
    if Path(saves).absolute() != Path(resumes).absolute():
        raise ValueError(
            f"log.ckpt.dirpath is {saves} and resume.resume_from_directory is {resumes}; a run "
            "resumes from the folder that it saves to, so set both, or neither"
        )
    tried = set[Path]()
    for key, path, is_file in places(recipe):
        if path not in tried:
            (require_file if is_file else require_folder)(path, key)
        tried.add(path)


def require_room(stages: Sequence[ResolvedStage], card: ModelCard) -> None:
    """Raise ValueError if the file system lacks room for the checkpoints that stages will write.

    Each stage keeps one, and a new one is complete before the one it replaces is removed. A stage
    that keeps all needs more than is checked.
    """
    left = [stage for stage in stages if not stage.is_done]
    if not left:
        return
    saved = max(SAVED_BYTES[stage.layout.precision] * card.parameters for stage in left)
    new = sum(newest_checkpoint(stage.checkpoints) is None for stage in left)
    require_folder(left[0].checkpoints, "the checkpoints' folder", room=saved * (new + 1))


def places(recipe: nemo_run.Partial) -> Iterator[tuple[str, Path, bool]]:
    """Yield the key, the path and whether it is a file, of each place that the recipe writes to."""
    yield "log.ckpt.dirpath", Path(recipe.log.ckpt.dirpath), False
    yield "log.explicit_log_dir", Path(recipe.log.explicit_log_dir), False
    yield "log.tensorboard.save_dir", Path(recipe.log.tensorboard.save_dir), False
    for at, callback in enumerate(recipe.trainer.callbacks):
        for name in sorted({"path", "folder"} & set(callback.__arguments__)):
            key = f"trainer.callbacks[{at}].{name}"
            yield key, Path(getattr(callback, name)), name == "path"
