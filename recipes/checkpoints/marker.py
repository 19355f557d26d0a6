# SPDX-License-Identifier: Apache-2.0
"""Completeness markers of checkpoints. Imports no torch, since the CLI checks them first."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from custom_modules.checkpoints.index import CheckpointError
from data.files.own_sum import KEY as OWN_SUM
from data.files.own_sum import has_wrong_sum, with_own_sum
from data.files.whole import write_text

RECIPE = "config.yaml"
"""File of a stage's resolved recipe, in the stage folder; its ranks read it."""

MARKER = "longhaul.json"

VOCABULARY = "vocabulary"
"""Fact of a marker: the tokens of the model, whose embedding may have further rows that pad it.
Markers of earlier versions lack it; their checkpoints have no padding."""

TRAINED_ON = "trained_on"
"""Fact of a marker: `Manifest.train_sha256` of the store that it was trained on. Markers of earlier
versions and of imports lack it."""

PATTERN = "pattern"
"""Fact of a marker: which layers of the model differ; it is there only if some do."""

ROTATION = "rotation"
"""Fact of a marker: what the built model rotated by (`recipes.checkpoints.rotation`). Markers of
earlier versions and of imports lack it."""

NATIVE_CONTEXT = "native_context"
"""Fact of an import's marker: tokens that the model was trained at, where the user stated them."""

ORIGIN = "imported_from"
"""Fact of an import's marker: the folder or the name on the hub. Earlier versions lack it."""


def is_marked(folder: Path) -> bool:
    """Return whether a folder has the marker of a complete checkpoint, valid or not.

    NeMo's sibling `<name>-unfinished` means that a save or a removal was interrupted.
    """
    return not folder.with_name(folder.name + "-unfinished").exists() and (folder / MARKER).exists()


def checkpoint_facts(folder: Path) -> dict[str, Any] | None:
    """Return the marker of a complete checkpoint, or None if there is none.

    Raises CheckpointError for a damaged marker: without the error the folder would count as empty,
    and the stage would start over.
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
    if has_wrong_sum(facts):
        raise CheckpointError(
            _damaged(path, "its SHA-256 differs from what was written"), path=path
        )
    facts.pop(OWN_SUM, None)
    types: dict[str, type] = {"step": int, "max_steps": int, "tokenizer": str}
    if VOCABULARY in facts:
        types[VOCABULARY] = int
    for name, of in types.items():
        if type(facts.get(name)) is not of:
            why = f"{name!r} is {facts[name]!r}" if name in facts else f"it has no {name!r}"
            raise CheckpointError(_damaged(path, why), path=path)
    return facts


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the marker that makes a checkpoint complete, after all its other files."""
    write_text(folder / MARKER, json.dumps(with_own_sum(facts), indent=1), durable=True)


def require_vocabulary(checkpoint: Path, tokens: int) -> None:
    """Raise ValueError if the checkpoint's model has another number of tokens, where it is known.

    Megatron loads an embedding with fewer or more rows, since both may be padding.
    """
    found = (checkpoint_facts(checkpoint) or {}).get(VOCABULARY, tokens)
    if found != tokens:
        raise ValueError(
            f"{checkpoint} is of a model with a vocabulary of {found:,} and this one has "
            f"{tokens:,}; start from a checkpoint of the same model"
        )


def origin_of(source: str) -> str:
    """Return what an import's marker records of a folder, its absolute path, or of a hub name."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def require_origin(checkpoint: Path, source: str) -> None:
    """Raise ValueError if a checkpoint was imported from another folder or name than `source`.

    Two folders of one name would otherwise share `models/NAME`, and the weights of the first would
    be trained for the second.
    """
    facts = checkpoint_facts(checkpoint) or {}
    found, asked = facts.get(ORIGIN), origin_of(source)
    if found not in (None, asked):
        words = shlex.join(["longhaul", "import", "--from", source, "--to"])
        raise ValueError(
            f"{checkpoint} was imported from {found}, not from {asked}; to train what it has use "
            f"--card {checkpoint}, or import the other: {words} models/OTHER_NAME, and name that"
        )


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
    """Return whether the stage that saves into `folder` has taken `steps` steps."""
    return steps_taken(folder) >= steps


def checkpoints_in(folder: Path) -> Path:
    """Return the checkpoint folder of a stage's folder; any other folder unchanged."""
    within = folder / "checkpoints"
    return within if within.is_dir() and checkpoint_facts(folder) is None else folder


def start_checkpoint(start: Path) -> Path:
    """Return the checkpoint that a stage starts from: a finished one of ours, or one of NeMo.

    A checkpoint of NeMo (written by `llm.import_ckpt`) is a folder with `weights/` and `context/`.
    Raises ValueError if there is neither, or if the stage that wrote it stopped before its end.
    """
    found = newest_checkpoint(start)
    if found is None:
        if (start / "weights").is_dir() and (start / "context").is_dir():
            return start
        raise ValueError(
            f"{start} holds no complete checkpoint to start from; run the stage before, import "
            "the published weights there, or for random weights state `start: scratch` in the "
            "ladder file (with `longhaul pretrain` also resume.start=None, or another PATH)"
        )
    facts = checkpoint_facts(found)
    if facts is not None and facts["step"] < facts["max_steps"]:
        raise ValueError(
            f"{found} is of an unfinished stage, which stopped at step {facts['step']} of "
            f"{facts['max_steps']}; run that stage to its end first"
        )
    return found
