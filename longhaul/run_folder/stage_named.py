# SPDX-License-Identifier: Apache-2.0
"""A stage of a run by its name, or by its length as `longhaul run --stage` takes it."""

from collections.abc import Sequence
from pathlib import Path

from eval.run_folder import read_stage
from recipes.checkpoints.marker import newest_checkpoint
from recipes.spec.naming import length_from, stage_folder
from recipes.spec.suggest import did_you_mean


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
