# SPDX-License-Identifier: Apache-2.0
"""How many broken records a store may leave out."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from data.formats.records import SourceError
from data.preparation.work import Receipt

SKIP_LIMIT = "1%"
ALWAYS_ALLOWED = 100
"""Broken records that a share in percent allows in any case: a small source has few records."""
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)(%?)")


def require_limit(limit: str) -> None:
    """Raise ValueError for words that are neither a count nor a share."""
    found = _LIMIT.fullmatch(limit)
    if found is None or (found[2] and float(found[1]) > 100) or (not found[2] and "." in limit):
        raise ValueError(
            f"--skip-limit {limit} is not a number of records such as 500, nor a share such as 1%"
        )


def require_few_broken(facts: dict[str, Any], receipts: Iterable[Receipt]) -> None:
    """Raise SourceError for broken records that were not to be skipped, or for too many."""
    broken = records = 0
    examples: list[str] = []
    for receipt in receipts:
        records += receipt.records
        broken += receipt.skipped.get("broken", 0)
        examples += receipt.examples
    if broken and not facts["skip_broken"]:
        raise SourceError(f"{examples[0]}; fix it, or skip such records with --skip-broken")
    if broken > _most(facts["skip_limit"], records):
        raise SourceError(
            f"{broken:,} of {records:,} records are broken, more than --skip-limit "
            f"{facts['skip_limit']} allows; the first: {examples[0]}"
        )


def require_below_count(facts: dict[str, Any], broken: int, examples: Sequence[str]) -> None:
    """Raise SourceError once a limit that is a count is exceeded, while tasks are left."""
    limit = facts["skip_limit"]
    if facts["skip_broken"] and not limit.endswith("%") and broken > _most(limit, 0):
        raise SourceError(
            f"{broken:,} records are broken so far, more than --skip-limit {limit} allows; one "
            f"of them: {examples[0]}"
        )


def _most(limit: str, records: int) -> float:
    found = _LIMIT.fullmatch(limit)
    assert found is not None
    if found[2]:
        return max(ALWAYS_ALLOWED, records * float(found[1]) / 100)
    return float(found[1])
