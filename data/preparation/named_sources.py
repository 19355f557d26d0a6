# SPDX-License-Identifier: Apache-2.0
"""Sources as a user names them: `NAME=SOURCE`, or one source without a name."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.formats.records import SourceError
from data.sources import kind_of
from data.splits import SOURCE_NAME
from data.store import ONLY_SOURCE

NamedSources = list[tuple[str, str | None]]
"""Name and source, in the order of the user."""


def named_sources(source: str | Mapping[str, str] | None) -> NamedSources:
    """Return sources with their names; raise SourceError for a name that files cannot have."""
    if not isinstance(source, Mapping):
        return [(ONLY_SOURCE, source)]
    if not source:
        raise SourceError("no source is named; give at least one")
    for name in source:
        _require_name(name, f"{name}={source[name]}")
    return list(source.items())


def parsed_sources(words: Sequence[str]) -> str | dict[str, str] | None:
    """Return the source, or the sources by name, of the words of a command line."""
    if not words:
        return None
    pairs = [_parsed(word) for word in words]
    if len(pairs) == 1 and pairs[0][0] is None:
        return pairs[0][1]
    found: dict[str, str] = {}
    for name, source in pairs:
        if name is None:
            raise SourceError(
                f"--source {source} is one of several and has no name; write --source NAME={source}"
            )
        if name in found:
            raise SourceError(
                f"two sources have the name {name}: --source {name}={found[name]} and --source "
                f"{name}={source}; give each its own, or one folder that holds both"
            )
        found[name] = source
    return found


def _parsed(word: str) -> tuple[str | None, str]:
    name, equals, source = word.partition("=")
    if kind_of(word) != "documents":
        return None, word  # its equals signs belong to its settings, and it is not a path
    if equals and kind_of(source) != "documents":
        _require_name(name, word)
        return name, source
    if not equals or Path(word).exists():
        return None, word
    if SOURCE_NAME.fullmatch(name) is not None:
        if not source:
            raise SourceError(f"--source {word} names no documents; write --source {name}=PATH")
        return name, source
    if ":" not in name and Path(source).exists():
        _require_name(name, word)
    return None, word


def _require_name(name: str, word: str) -> None:
    if SOURCE_NAME.fullmatch(name) is None:
        raise SourceError(
            f"--source {word}: {name!r} cannot name a source; use up to 32 lower-case letters, "
            "digits, - and _"
        )
