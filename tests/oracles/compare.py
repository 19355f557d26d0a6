# SPDX-License-Identifier: Apache-2.0
"""Compare the records of two trees by name; what may differ is in `renames.yaml` with its reason.

A record is a dictionary of entries, each a value of JSON. The place of a value is written as
`ORACLE/ENTRY/KEY/KEY`; dictionaries of a list that have a `_target_` are named by it, not by their
number, so that one more of them moves no other.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .command import DROPPED

KINDS = ("renamed", "removed", "added", "changed")
MESSAGE = "/message"
NAMED = "/named"
"""Key of the words that the answer must contain, in the words of each tree."""
NUMBER = r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
VALUES = re.compile(rf"{NUMBER}|'(?!--)[^']*'")
"""Values that a message must keep: numbers, and quoted text other than options."""


@dataclass
class Explanation:
    """A difference that is meant."""

    on: str
    """Place, where * stands for any characters."""
    kind: str
    reason: str
    old: str = ""
    new: str = ""
    used: int = field(default=0, compare=False)

    @classmethod
    def of(cls, given: dict[str, str]) -> "Explanation":
        """Return the explanation of an entry of the file; raise ValueError if it lacks anything."""
        one = cls(**given)
        if one.kind not in KINDS or not one.reason or (one.kind == "renamed") != bool(one.old):
            raise ValueError(f"{given}: kind is one of {KINDS}, old and new go with renamed")
        return one

    def covers(self, place: str, kind: str) -> bool:
        """Whether a difference at a place is meant; count it."""
        covered = self.kind == kind and bool(self._pattern.fullmatch(place))
        self.used += covered
        return covered

    def renames(self, entry: str, text: str) -> bool:
        """Whether a text of the base has a new name; count it."""
        renamed = self.kind == "renamed" and text == self.old
        covered = renamed and bool(self._pattern.fullmatch(entry))
        self.used += covered
        return covered

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self.on.split("*"))), re.S)

    def __str__(self) -> str:
        names = f" {self.old} -> {self.new}" if self.old else ""
        return f"{self.kind} {self.on}{names} ({self.reason})"


@dataclass
class Difference:
    """A place where the trees differ."""

    place: str
    was: str
    now: str
    kind: str
    reworded: bool = False
    """Of a message: another text with the same values."""

    def __str__(self) -> str:
        if self.kind == "changed":
            return f"{self.place}\n    was {self.was}\n    is  {self.now}"
        return f"{self.place}: {self.kind}, {self.was or self.now}"


def renamed(value: Any, entry: str, explained: list[Explanation]) -> Any:
    """Return a value of the base with its names as they are now."""
    if isinstance(value, dict):
        return {key: renamed(one, entry, explained) for key, one in value.items()}
    if isinstance(value, list):
        return [renamed(one, entry, explained) for one in value]
    if isinstance(value, str):
        for explanation in explained:
            if explanation.renames(entry, value):
                return explanation.new
    return value


def leaves(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield each value below a place, as JSON."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, f"{place}/{key}")
    elif isinstance(value, list) and value and all(_target(one) for one in value):
        seen: dict[str, int] = {}
        for one in value:
            name = _target(one)
            seen[name] = seen.get(name, 0) + 1
            again = f"#{seen[name]}" if seen[name] > 1 else ""
            yield from leaves(one, f"{place}[{name}{again}]")
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for number, one in enumerate(value):
            yield from leaves(one, f"{place}/{number}")
    else:
        yield place, json.dumps(value)


def _target(value: Any) -> str:
    return str(value["_target_"]) if isinstance(value, dict) and "_target_" in value else ""


def differences(
    oracle: str, base: dict[str, Any], here: dict[str, Any], explained: list[Explanation]
) -> list[Difference]:
    """Return what differs between the records of an oracle and is not explained."""
    was: dict[str, str] = {}
    now: dict[str, str] = {}
    base = {name: value for name, value in base.items() if here.get(name) != DROPPED}
    here = {name: value for name, value in here.items() if value != DROPPED}
    for name, value in base.items():
        was |= leaves(renamed(value, f"{oracle}/{name}", explained), f"{oracle}/{name}")
    for name, value in here.items():
        now |= leaves(value, f"{oracle}/{name}")
    found = []
    for place in sorted(was.keys() | now.keys()):
        if was.get(place) == now.get(place) or place.endswith(NAMED):
            continue
        kind = "removed" if place not in now else "added" if place not in was else "changed"
        if sum(one.covers(place, kind) for one in explained):  # each is counted
            continue
        one = Difference(place, was.get(place, ""), now.get(place, ""), kind)
        if kind == "changed" and place.endswith(MESSAGE):
            named = now.get(place.removesuffix(MESSAGE) + NAMED, '""')
            one.reworded = keeps_values(json.loads(one.was), json.loads(one.now), json.loads(named))
        found.append(one)
    return [*found, *_order(oracle, base, here, explained)]


def keeps_values(was: str, now: str, named: str) -> bool:
    """Whether a message still has what it answers for, its numbers and what it quotes."""
    return all(value in now for value in (named, *VALUES.findall(was)))


def _order(
    oracle: str, base: dict[str, Any], here: dict[str, Any], explained: list[Explanation]
) -> Iterator[Difference]:
    """Yield lists whose parts that both trees have are in another order."""
    for name in base.keys() & here.keys():
        entry = f"{oracle}/{name}"
        was = dict(_lists(renamed(base[name], entry, explained), entry))
        for place, now in _lists(here[name], entry):
            before = [one for one in was.get(place, []) if one in now]
            after = [one for one in now if one in was.get(place, [])]
            if before != after and not sum(one.covers(place, "changed") for one in explained):
                yield Difference(place, ", ".join(before), ", ".join(after), "changed")


def _lists(value: Any, place: str) -> Iterator[tuple[str, list[str]]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _lists(one, f"{place}/{key}")
    elif isinstance(value, list) and value and all(_target(one) for one in value):
        yield place, [_target(one) for one in value]


def unused(explained: list[Explanation], oracles: list[str]) -> list[Explanation]:
    """Return the explanations of these oracles that explain nothing."""
    return [one for one in explained if not one.used and one.on.split("/")[0] in oracles]
