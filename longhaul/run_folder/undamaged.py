# SPDX-License-Identifier: Apache-2.0
"""Checks that store and checkpoints are undamaged, before a command starts ranks.

The store is compared with its checksums here, once for all ranks and stages. Of a checkpoint only
sizes and index are checked; the ranks verify the contents of its files while they read them
(`recipes.checkpoints.verified`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from data.store import SPLITS, Manifest, SplitName
from data.token_files import verification
from longhaul.jobs.evaluation import require_trained
from recipes.checkpoints.files import note, require_whole
from recipes.checkpoints.marker import newest_checkpoint
from recipes.resolved.stage import ResolvedStage
from recipes.spec.naming import stage_folder


def require_undamaged(stages: Sequence[ResolvedStage], verify: bool | None) -> list[str]:
    """Raise ValueError for damage in the store of stages, or in the checkpoints that they have.

    `verify` is True for every byte of the store, None for a sample, False to skip the contents of
    files. Returns notes for the user, a sentence each.
    """
    notes = require_checkpoints(stages, verify)
    for store in dict.fromkeys(str(stage.recipe.data.store) for stage in stages):
        notes += _store(Manifest.load(store), verify, SPLITS)
    return notes


def require_checkpoints(stages: Sequence[ResolvedStage], verify: bool | None) -> list[str]:
    """Raise ValueError for an incomplete checkpoint that a stage would read.

    Returns a sentence for each checkpoint that is not verified.
    """
    checkpoints = [checkpoint for stage in stages if (checkpoint := _read_by(stage)) is not None]
    for checkpoint in checkpoints:
        require_whole(checkpoint)
    return _unverified(checkpoints, verify)


def require_evaluable(
    run: Path, stages: Sequence[str], manifest: Manifest, verify: bool | None
) -> list[str]:
    """Raise ValueError for stages that cannot be evaluated on the held-out split of a store.

    Returns notes on the verification, a sentence each.
    """
    require_trained(run, list(stages), manifest)
    newest = (newest_checkpoint(stage_folder(run, name) / "checkpoints") for name in stages)
    notes = _unverified([checkpoint for checkpoint in newest if checkpoint is not None], verify)
    return [*notes, *_store(manifest, verify, ("heldout",))]


def _unverified(checkpoints: Sequence[Path], verify: bool | None) -> list[str]:
    notes = (note(checkpoint, verify is not False) for checkpoint in checkpoints)
    return [sentence for sentence in notes if sentence is not None]


def _read_by(stage: ResolvedStage) -> Path | None:
    """Return the checkpoint that a stage reads first, if it exists yet."""
    own = newest_checkpoint(stage.checkpoints)
    if own is not None or stage.recipe.resume.start is None:
        return own
    start = Path(stage.recipe.resume.start)
    of_nemo = start if (start / "weights").is_dir() else None
    return newest_checkpoint(start) or of_nemo


def _store(manifest: Manifest, verify: bool | None, splits: Sequence[SplitName]) -> Iterator[str]:
    """Compare a store with its checksums; yield notes on what was and was not verified."""
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
