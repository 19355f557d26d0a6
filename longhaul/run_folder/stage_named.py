# SPDX-License-Identifier: Apache-2.0
"""A run by its folder, and a stage by its folder, its name, or its length."""

from collections.abc import Sequence
from pathlib import Path

from eval.run_folder import read_stage, require_run
from longhaul.run_folder.lock import holder_of
from recipes.checkpoints.marker import newest_checkpoint
from recipes.spec.naming import length_from, stage_folder
from recipes.spec.suggest import did_you_mean

MOST_NAMED = 5
"""Runs that an error names."""


def stage_named(run: Path, word: str, names: Sequence[str]) -> str:
    """Return the stage of `names` that a word means: its name, or a length that only it has.

    The length is that of its sequences or of its context. Raises ValueError for any other word.
    """
    if word in names:
        return word
    if not names:
        raise ValueError(f"{run} has no stage {word}; it has none yet")
    try:
        length = length_from(word)
    except ValueError:
        raise ValueError(f"{run} has no stage {word!r}; {did_you_mean(word, names)}") from None
    records = ((name, read_stage(run, name)) for name in names)
    found = [
        name
        for name, record in records
        if record is not None and length in (record.seq_length, record.context)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{run} has {len(found)} stages of {word}: {', '.join(found)}; name one")
    raise ValueError(f"{run} has no stage of {word}; it has {', '.join(names)}")


def require_any_checkpoint(run: Path, names: Sequence[str]) -> None:
    """Raise ValueError for a stage without a complete checkpoint."""
    for name in names:
        if newest_checkpoint(stage_folder(run, name) / "checkpoints") is None:
            raise ValueError(f"{name} has no complete checkpoint in {run}; train it first")


def run_and_stage(run: Path, stage: str = "") -> tuple[Path, str]:
    """Return the run and the stage that are meant; raise ValueError for what is not a run."""
    if run.name in ("", ".."):  # `.` and `..` have no name of a stage in them
        run = run.resolve()
    if run.parent.name == "stages" and (run / "stage.json").is_file():
        if stage and stage != run.name:
            raise ValueError(f"{run} is the folder of a stage, and --stage names {stage}")
        run, stage = run.parent.parent, run.name
    names = _require_stages(run)
    return run, stage and stage_named(run, stage, names)


def _require_stages(run: Path) -> list[str]:
    """Return the names of a run's stages, none before the first; raise ValueError if it is none."""
    require_run(run)
    names = sorted(folder.name for folder in (run / "stages").glob("*/") if folder.is_dir())
    known = names or (run / "run.json").is_file() or (run / "launch").is_dir()
    if known or holder_of(run) is not None:
        return names
    runs = sorted(path.parent.name for path in run.glob("*/stages/"))
    if runs:
        named = ", ".join([*runs[:MOST_NAMED], *(["..."] if len(runs) > MOST_NAMED else [])])
        raise ValueError(f"{run} is not a run folder; name one of the runs in it: {named}")
    raise ValueError(
        f"{run} is not a run folder: it has no stages; name the folder that `longhaul run` or "
        "`longhaul pretrain` writes to (--out)"
    )
