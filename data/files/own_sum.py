# SPDX-License-Identifier: Apache-2.0
"""JSON files that have a checksum of their own content; standard library only.

A manifest or a marker lists the checksums of other files, and none lists its own. So it has one of
its content, in a canonical form: a flipped bit in a number would otherwise be another number.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

KEY = "own_sha256"
"""Files of earlier versions lack it."""


def with_own_sum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file with the sum of it."""
    return {**content, KEY: _sum(content)}


def has_wrong_sum(content: Mapping[str, Any]) -> bool:
    """Whether the content of a file is not that of which it has the sum."""
    return KEY in content and content[KEY] != _sum(content)


def _sum(content: Mapping[str, Any]) -> str:
    others = {key: value for key, value in content.items() if key != KEY}
    canonical = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
