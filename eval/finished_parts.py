# SPDX-License-Identifier: Apache-2.0
"""The finished parts of an evaluation that is not complete, so that it continues where it stopped.

    RUN/eval/<stage>.partial    each part as soon as it is measured, and what it was measured with

A part is used again only by the same evaluation: the same settings, weights, store, tokenizer,
ranks of the model, device and code. A file of another evaluation is replaced, with a warning.

A commit does not tell the code of a tree with changes, nor of one without git, so the files of the
packages that measure are compared too.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist

from eval.run_folder import evaluation_path, plain, write_json
from recipes.spec.schema import decode

log = logging.getLogger(__name__)

TREE = Path(__file__).resolve().parents[1]
PACKAGES = ("custom_modules", "data", "eval", "recipes")
"""Packages whose code measures, or makes the model that is measured."""


class FinishedParts:
    """The finished parts of one model's evaluation; all ranks have the same ones.

    `identity` is everything that the parts depend on; it is compared on the first rank.
    """

    def __init__(self, run: Path, name: str, identity: Mapping[str, Any]) -> None:
        self._name, self._path = name, partial_path(run, name)
        self._identity = json.loads(json.dumps(plain(dict(identity))))
        first = dist.get_rank() == 0
        if first:
            self._identity["code"] = code_sha256()
        read = [_parts_of(self._path, self._identity) if first else {}]
        dist.broadcast_object_list(read)
        self._parts: dict[str, Any] = read[0]

    def part(self, title: str, kind: Any, measure: Callable[[], Any]) -> Any:
        """Return a part that is there as a `kind`, or else measure it and write it.

        Every rank of the job asks for the same parts in the same order.
        """
        first = dist.get_rank() == 0
        if title in self._parts:
            if first:
                log.warning("%s: %s: there already", self._name, title)
            return decode(kind, self._parts[title], f"{self._path}: {title}")
        measured = measure()
        if first:
            self._parts[title] = plain(measured)
            write_json(self._path, {"identity": self._identity, "parts": self._parts})
        return measured

    def remove(self) -> None:
        """Remove the file, on the first rank; the evaluation is complete."""
        if dist.get_rank() == 0:
            self._path.unlink(missing_ok=True)


def partial_path(run: Path, name: str) -> Path:
    """Return the path of the finished parts of an evaluation."""
    return evaluation_path(run, name).with_suffix(".partial")


def titles_of(run: Path, name: str) -> list[str]:
    """Return the parts that an evaluation under way or interrupted has finished, or nothing."""
    path = partial_path(run, name)
    try:
        found = path.stat()
    except FileNotFoundError:
        return []
    return list(_titles(path, (found.st_mtime_ns, found.st_size, found.st_ino)))


@lru_cache(maxsize=64)
def _titles(path: Path, _version: tuple[int, ...]) -> tuple[str, ...]:
    """Return the titles in one version of a file, which may hold the losses of many documents."""
    return tuple(_content(path).get("parts", {}))


def digest(*files: Path) -> str:
    """Return the SHA-256 of the content of small files."""
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()


@cache
def code_sha256() -> str:
    """Return the SHA-256 of the code that measures: names and content of its Python files."""
    found = sha256()
    for file in sorted(file for name in PACKAGES for file in (TREE / name).rglob("*.py")):
        found.update(f"{file.relative_to(TREE)} {digest(file)}\n".encode())
    return found.hexdigest()


def _parts_of(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts in a file; empty for a file of another evaluation, or a damaged one."""
    content = _content(path)
    before = content.get("identity")
    if before == identity:
        parts: dict[str, Any] = content["parts"]
        return parts
    if isinstance(before, dict):
        names = sorted(name for name in identity if before.get(name) != identity[name])
        log.warning(
            "%s: measured again, since it is of another evaluation (%s)",
            path,
            ", ".join(names) or "more is compared",
        )
    return {}


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    known = isinstance(content, dict) and isinstance(content.get("parts"), dict)
    return content if known else {}
