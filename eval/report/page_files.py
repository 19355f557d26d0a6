# SPDX-License-Identifier: Apache-2.0
"""The files of a page: itself, its figures as SVG and PNG, and its figures as numbers in JSON.

    report.html, report.json, by_position.svg, by_position.png, ...
    name.html, name.json, name_by_position.svg, ...        a page of another name

The JSON file lists the pictures, so that a later page removes those that it does not have any more.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from data.files.whole import write_bytes
from eval.report import plots
from eval.run_folder import plain

PAGE_NAME = "report.html"
FORMAT = "longhaul report 1"
"""Field `format` of the JSON file; another number says that fields have another meaning."""
PICTURE = re.compile(r"(against_base|by_position|context_gain|ruler|training)(_\d+)?\.(png|svg)")


class PageError(ValueError):
    """Raised for a page that cannot be written where it should."""


def target_of(run: Path, out: Path | None) -> Path:
    """Return the page that is written for a run and a file or folder, which may be None."""
    target = run / PAGE_NAME if out is None else out
    return target / PAGE_NAME if target.is_dir() else target


def json_of(page: Path) -> Path:
    """Return the JSON file next to a page."""
    return page.with_suffix(".json")


def require_own(page: Path) -> None:
    """Raise PageError if the JSON file of a page exists and is not that of a page."""
    path = json_of(page)
    if path.exists() and _content(path) is None:
        raise PageError(
            f"the numbers of {page} would replace {path}, which is not of a report; name another "
            "page with --out"
        )


def write_page(
    target: Path, page: bytes, content: Mapping[str, Any], figures: Mapping[str, Figure | None]
) -> None:
    """Write a page, its numbers and its figures, after all of them are drawn.

    The names of the figures begin with that of a page of another name than `PAGE_NAME`. Figures of
    an earlier page of this name that this one does not have are removed.
    """
    require_own(target)
    drawn = {
        target.with_name(f"{_before(target)}{name}.{kind}"): plots.standalone(figure, kind)
        for name, figure in figures.items()
        if figure is not None
        for kind in plots.KINDS
    }
    stale = [path for path in _pictures(target) if path not in drawn]
    numbers = {"format": FORMAT, "figures": [path.name for path in drawn], **plain(dict(content))}
    text = json.dumps(numbers, indent=1, allow_nan=False) + "\n"
    for path, bytes_ in (drawn | {json_of(target): text.encode(), target: page}).items():
        write_bytes(path, bytes_)
    for path in stale:
        path.unlink(missing_ok=True)


def _pictures(target: Path) -> Iterator[Path]:
    """Yield the pictures of the page that is there: by its JSON file, or else by their names."""
    content, before = _content(json_of(target)), _before(target)
    if content is not None:
        listed = content.get("figures")
        names = (
            [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        )
    elif target.is_file():
        names = [path.name for path in target.parent.iterdir()]
    else:
        names = []
    for name in names:
        if name.startswith(before) and PICTURE.fullmatch(name.removeprefix(before)):
            yield target.with_name(name)


def _content(path: Path) -> dict[str, Any] | None:
    """Return the JSON file of a page; None for anything else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    own = isinstance(found, dict) and str(found.get("format")).startswith("longhaul report")
    return found if own else None


def _before(target: Path) -> str:
    return "" if target.name == PAGE_NAME else f"{target.stem}_"
