# SPDX-License-Identifier: Apache-2.0
"""The result of one check, and the page and exit code of many."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, Literal

State = Literal["ok", "warning", "failure"]
_WORDS: dict[State, str] = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}


class Group(IntEnum):
    """Subject of a check; its value is the exit code if this group fails first.

    No value is 1 (an error of the program), 2 (a user's mistake) or 85 to 89 (the job scripts).
    """

    RANKS = 20
    GPUS = 21
    TOPOLOGY = 22
    VERSIONS = 23
    HOST = 24
    FILES = 25
    NETWORK = 26
    CLOCK = 27
    SPEED = 28


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightCheck:
    """Result of one check."""

    group: Group
    name: str
    state: State
    said: str
    """The finding, with its value."""
    remedy: str = ""
    """The remedy; empty if all is well."""
    nodes: tuple[str, ...] = ()
    """The nodes concerned; empty for a finding about the whole job."""

    @classmethod
    def ok(cls, group: Group, name: str, said: str) -> "PreflightCheck":
        """Return a check that passed."""
        return cls(group=group, name=name, state="ok", said=said)

    @classmethod
    def warning(
        cls, group: Group, name: str, said: str, remedy: str, nodes: Collection[str] = ()
    ) -> "PreflightCheck":
        """Return a warning: the job will run, more slowly or with less margin."""
        seen = tuple(sorted(nodes))
        return cls(group=group, name=name, state="warning", said=said, remedy=remedy, nodes=seen)

    @classmethod
    def failure(
        cls, group: Group, name: str, said: str, remedy: str, nodes: Collection[str] = ()
    ) -> "PreflightCheck":
        """Return a failure: the job would fail, hang, or compute something else than requested."""
        seen = tuple(sorted(nodes))
        return cls(group=group, name=name, state="failure", said=said, remedy=remedy, nodes=seen)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "PreflightCheck":
        """Return the check from its `asdict`."""
        group, nodes = Group(found["group"]), tuple(found["nodes"])
        return cls(**{**found, "group": group, "nodes": nodes})

    def __str__(self) -> str:
        """One line: state, name, finding, nodes and remedy."""
        where = f" on {', '.join(self.nodes)}" if self.nodes else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{_WORDS[self.state]} {self.name}{where}: {self.said}{remedy}"


class PreflightError(RuntimeError):
    """Report the checks that failed; `exit_code` says which group failed first.

    `met` is False if this rank could not reach the others: it must then show the error itself.
    """

    def __init__(
        self, checks: Iterable[PreflightCheck], *, nodes: Iterable[str] = (), met: bool = True
    ) -> None:
        """Take every check of the page, and the job's nodes that this rank could reach."""
        self.checks = list(checks)
        self.nodes, self.met = tuple(nodes), met
        failed = failures(self.checks)
        self.exit_code = exit_code(self.checks)
        lines = "".join(f"\n{check}" for check in failed)
        super().__init__(f"preflight found {len(failed)} failure(s):{lines}")


def failures(checks: Iterable[PreflightCheck]) -> list[PreflightCheck]:
    """Return the checks that failed, by group."""
    return sorted((c for c in checks if c.state == "failure"), key=lambda check: check.group)


def blamed(checks: Iterable[PreflightCheck], nodes: Collection[str]) -> tuple[str, ...]:
    """Return, sorted, the nodes of the job that failed by themselves.

    A check that fails on all `nodes` is a mistake of the job and blames none of them. If every node
    would be blamed, none is.
    """
    every = set(nodes)
    seen: dict[tuple[Group, str], set[str]] = {}
    for check in failures(checks):
        seen.setdefault((check.group, check.name), set()).update(every.intersection(check.nodes))
    found = set[str]().union(*(where for where in seen.values() if where < every))
    return tuple(sorted(found)) if found < every else ()


def exit_code(checks: Iterable[PreflightCheck]) -> int:
    """Return 0 if nothing failed, else the value of the first group that did."""
    return next((int(check.group) for check in failures(checks)), 0)


def page(checks: Iterable[PreflightCheck]) -> Iterator[str]:
    """Yield a line a check, by group, and a last one that counts them."""
    listed = sorted(checks, key=lambda check: check.group)
    yield from map(str, listed)
    failed = len(failures(listed))
    warned = sum(check.state == "warning" for check in listed)
    yield f"{len(listed)} checks: {failed} failed, {warned} warned"


def as_json(checks: Iterable[PreflightCheck]) -> str:
    """Return the page as JSON: exit code and checks, with the group of each by name."""
    listed = sorted(checks, key=lambda check: check.group)
    rows = [{**asdict(check), "group": check.group.name.lower()} for check in listed]
    return json.dumps({"exit_code": exit_code(listed), "checks": rows}, indent=1)


def joined(by_node: dict[str, list[PreflightCheck]]) -> list[PreflightCheck]:
    """Return the checks of several nodes as one page.

    A check that passed on every node is one line, of the first node; any other names its nodes.
    """
    names = dict.fromkeys((c.group, c.name) for checks in by_node.values() for c in checks)
    found: list[PreflightCheck] = []
    for group, name in names:
        seen = {
            node: check
            for node, checks in by_node.items()
            for check in checks
            if (check.group, check.name) == (group, name)
        }
        if all(check.state == "ok" for check in seen.values()):
            found.append(next(iter(seen.values())))
            continue
        alike: dict[PreflightCheck, list[str]] = {}
        for node, check in seen.items():
            if check.state != "ok":
                alike.setdefault(check, []).append(node)
        found += [replace(check, nodes=tuple(nodes)) for check, nodes in alike.items()]
    return found
