# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are whole; light, since the CLI asks before anything is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from custom_modules.checkpoints.index import CheckpointError
from data.files.whole import write_text

RECIPE = "config.yaml"
"""A stage's resolved recipe, in its folder; what its ranks read."""

MARKER = "longhaul.json"


def is_marked(folder: Path) -> bool:
    """Say whether a folder has the marker of a complete checkpoint, in whatever state it is.

    NeMo's sibling `<name>-unfinished` means a save or a removal was under way.
    """
    return not folder.with_name(folder.name + "-unfinished").exists() and (folder / MARKER).exists()


def checkpoint_facts(folder: Path) -> dict[str, Any] | None:
    """Return the marker of a complete checkpoint, or None where there is none.

    Raises CheckpointError for a marker that is there and damaged: without one the folder would
    count as empty, and a stage would begin anew.
    """
    if not is_marked(folder):
        return None
    path = folder / MARKER
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # removed at this moment
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", path=path) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(path, str(error)), path=path) from error
    if not isinstance(facts, dict):
        raise CheckpointError(_damaged(path, "it is not a JSON object"), path=path)
    for name, of in (("step", int), ("max_steps", int), ("tokenizer", str)):
        if type(facts.get(name)) is not of:
            why = f"{name!r} is {facts[name]!r}" if name in facts else f"it has no {name!r}"
            raise CheckpointError(_damaged(path, why), path=path)
    return facts


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the marker that makes a checkpoint complete, after everything else of it."""
    write_text(folder / MARKER, json.dumps(facts, indent=1), durable=True)


def _damaged(path: Path, why: str) -> str:
    return (
        f"{path} is damaged ({why}); restore it from a copy, or remove the folder {path.parent} to "
        "train again from an earlier checkpoint or from the start"
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in `folder`, or `folder` if it is one."""
    if checkpoint_facts(folder) is not None:
        return folder
    if not folder.is_dir():
        return None
    complete = [
        (facts["step"], path)
        for path in folder.iterdir()
        if (facts := checkpoint_facts(path)) is not None
    ]
    return max(complete)[1] if complete else None


def steps_taken(folder: Path) -> int:
    """Return the step of the newest complete checkpoint in `folder`, 0 for none."""
    newest = newest_checkpoint(folder)
    facts = None if newest is None else checkpoint_facts(newest)
    return 0 if facts is None else int(facts["step"])


def is_finished(folder: Path, steps: int) -> bool:
    """Say whether the stage that saves into `folder` has taken `steps` steps."""
    return steps_taken(folder) >= steps


def checkpoints_in(folder: Path) -> Path:
    """Return where the checkpoints of a stage's folder are; any other folder as it is."""
    within = folder / "checkpoints"
    return within if within.is_dir() and checkpoint_facts(folder) is None else folder


def start_checkpoint(start: Path) -> Path:
    """Return the checkpoint that a stage begins from: one of ours, finished, or one of NeMo's.

    NeMo's own (`llm.import_ckpt` writes them) is a folder with `weights/` and `context/`. Raises
    ValueError where there is neither, or where the stage that wrote it stopped before its end.
    """
    found = newest_checkpoint(start)
    if found is None:
        if (start / "weights").is_dir() and (start / "context").is_dir():
            return start
        raise ValueError(
            f"{start} holds no complete checkpoint to start from; run the stage before, import "
            "the published weights there, or set resume.start=PATH (None for random weights)"
        )
    facts = checkpoint_facts(found)
    if facts is not None and facts["step"] < facts["max_steps"]:
        raise ValueError(
            f"{found} is where its stage stopped, at step {facts['step']} of "
            f"{facts['max_steps']}; run that stage to its end first"
        )
    return found
