# SPDX-License-Identifier: Apache-2.0
"""What an engine makes of the answer of a worker."""

from typing import Any

from data.formats.records import SourceError
from data.preparation.work import Receipt, Work


def receipt_of(answer: dict[str, Any], work: Work) -> Receipt:
    """Return the receipt of an answer; raise the error if it has one."""
    if "refused" in answer:
        raise SourceError(answer["refused"])
    if "os_error" in answer:
        number, words, name = answer["os_error"]
        raise OSError(number, words, name or str(work.folder))
    return Receipt.of_json(answer["receipt"])


def described(work: Work, number: int) -> str:
    """Return a shard in words, for an error."""
    pieces = work.shard(number).pieces
    more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    return f"part {number} ({pieces[0].path}{more})"
