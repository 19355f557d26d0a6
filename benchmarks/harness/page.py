# SPDX-License-Identifier: Apache-2.0
"""A result as a Markdown page: what was run, on what, and tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.files.whole import write_text

if TYPE_CHECKING:
    import torch  # takes seconds, and no table needs it


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; numbers are right-aligned, the first two columns left."""
    lines = [head, [":--" if at < 2 else "--:" for at in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(title: str, facts: Mapping[str, str], sections: Sequence[str]) -> str:
    """Return the whole page."""
    listed = "\n".join(f"* {name}: {value}" for name, value in facts.items())
    return "\n\n".join([f"# {title}", listed, *sections]) + "\n"


def write(path: Path, text: str) -> None:
    """Write the file at once: readers find all of it or nothing."""
    write_text(path, text)


def milliseconds(seconds: float) -> str:
    """Return a time with three digits that count."""
    return f"{seconds * 1e3:,.{0 if seconds >= 1 else 1}f}"


def mebibytes(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / 2**20:,.2f}"


def name_of(dtype: "torch.dtype") -> str:
    """Return a dtype's name without the package."""
    return str(dtype).removeprefix("torch.")
