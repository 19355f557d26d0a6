# SPDX-License-Identifier: Apache-2.0
"""What a command asks of store and checkpoints before it starts ranks: that they are undamaged.

The store is compared with its sums here, once for all ranks and stages. Of a checkpoint sizes and
index are; the ranks compare what is in its files while they read them (`recipes.verified`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import nemo_run
import typer

from data import verification
from data.store import SPLITS, Manifest, SplitName
from eval.results import stage_folder
from longhaul.evaluation_job import require_trained
from recipes.checkpoint_files import note, require_whole
from recipes.finished import newest_checkpoint


def require_undamaged(recipes: Sequence[nemo_run.Partial], verify: bool | None) -> None:
    """Raise ValueError for damage in the store of stages, or in the checkpoints that they have.

    `verify` is True for every byte of the store, None for a sample, False for nothing of what files
    hold. What is not compared is said.
    """
    require_checkpoints(recipes, verify)
    for store in dict.fromkeys(str(recipe.data.store) for recipe in recipes):
        _say(*_store(Manifest.load(store), verify, SPLITS))


def require_checkpoints(recipes: Sequence[nemo_run.Partial], verify: bool | None) -> None:
    """Raise ValueError for a checkpoint, which a stage would read, that is not whole."""
    for recipe in recipes:
        if (checkpoint := _read_by(recipe)) is not None:
            require_whole(checkpoint)
            _say(note(checkpoint, verify is not False))


def require_evaluable(
    run: Path, stages: Sequence[str], manifest: Manifest, verify: bool | None
) -> None:
    """Raise ValueError for stages that cannot be evaluated on the held-out split of a store."""
    require_trained(run, list(stages), manifest)
    for name in stages:
        checkpoint = newest_checkpoint(stage_folder(run, name) / "checkpoints")
        assert checkpoint is not None, "require_trained found it"
        _say(note(checkpoint, verify is not False))
    _say(*_store(manifest, verify, ("heldout",)))


def _read_by(recipe: nemo_run.Partial) -> Path | None:
    """Return the checkpoint that a stage reads first, if it is there yet."""
    own = newest_checkpoint(Path(recipe.resume.resume_from_directory))
    if own is not None or recipe.resume.start is None:
        return own
    start = Path(recipe.resume.start)
    of_nemo = start if (start / "weights").is_dir() else None
    return newest_checkpoint(start) or of_nemo


def _store(
    manifest: Manifest, verify: bool | None, splits: Sequence[SplitName]
) -> Iterator[str | None]:
    """Compare a store with its sums; yield what is not compared."""
    if verify is False:
        yield f"the store {manifest.root} is not verified, as --no-verify asks"
        return
    read = verification.verify(manifest, whole=verify is True, splits=splits)
    if verify is True:
        yield f"{manifest.root}: {read / 1e6:,.1f} MB have the SHA-256 that was written"
    elif not verification.is_sampled(manifest, splits=splits):
        yield (
            f"the tokens of {manifest.root} have no sums of blocks and are not verified; --verify "
            "reads all of them, and a store that is prepared again has such sums"
        )


def _say(*sentences: str | None) -> None:
    for sentence in sentences:
        if sentence is not None:
            typer.echo(f"note: {sentence}", err=True)
