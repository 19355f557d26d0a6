"""Which checkpoints are whole; light, since the CLI asks before anything is loaded."""

import json
from pathlib import Path
from typing import Any

MARKER = "longhaul.json"


def checkpoint_facts(folder: Path) -> dict[str, Any] | None:
    """Return the marker of a complete checkpoint, or None for anything else.

    NeMo's sibling `<name>-unfinished` means a save or a removal was under way.
    """
    if folder.with_name(folder.name + "-unfinished").exists():
        return None
    try:
        facts = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and "step" in facts else None


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


def is_finished(folder: Path) -> bool:
    """Say whether the stage that saves into `folder` has run to its last step."""
    newest = newest_checkpoint(folder)
    if newest is None:
        return False
    facts = checkpoint_facts(newest)
    return facts is not None and facts["step"] >= facts["max_steps"]
