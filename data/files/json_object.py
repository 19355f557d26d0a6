# SPDX-License-Identifier: Apache-2.0
"""Read a small JSON record that may be missing or cut short; standard library only."""

import json
from pathlib import Path
from typing import Any


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none, or it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
