# SPDX-License-Identifier: Apache-2.0
"""What --profile asks for, and whether a stage can be profiled so."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.checkpoints.marker import steps_taken
from recipes.spec.naming import stage_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recipes.resolved.stage import ResolvedStage
    from recipes.shipped.row import Row

FOLDER = "profile"
"""Folder of a stage that its profiles are written to."""
EXPECTED = "'steps=5:8', or with further words 'steps=5:8 ranks=0,1 shapes stack' (or nsys)"
SWITCHES = ("shapes", "stack", "nsys")
MOVING = ("trainer.", "log.", "resume.")
"""Overrides that may change the steps, ranks or places of a stage."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Steps of a stage, counted from 1 and both included, and the ranks that are profiled."""

    first: int
    last: int
    ranks: tuple[int, ...] | None = (0,)
    """None: every rank."""
    shapes: bool = False
    stack: bool = False
    nsys: bool = False

    @classmethod
    def of(cls, words: str) -> "ProfileRequest":
        """Return what the words of --profile mean; raise ValueError for others."""
        given: dict[str, str] = {}
        for word in words.split():
            name, equals, value = word.partition("=")
            if name not in (("steps", "ranks") if equals else SWITCHES):
                raise ValueError(f"--profile: {word!r} is unknown; expected {EXPECTED}")
            if name in given:
                raise ValueError(f"--profile: {name} is given twice; expected {EXPECTED}")
            given[name] = value
        if "steps" not in given:
            raise ValueError(f"--profile is {words!r} and names no steps; expected {EXPECTED}")
        switches = {name: name in given for name in SWITCHES}
        if switches["nsys"] and (switches["shapes"] or switches["stack"]):
            raise ValueError(
                "--profile: shapes and stack are of PyTorch's trace, which nsys replaces; leave "
                "them out, or leave out nsys"
            )
        first, last = _steps(given["steps"])
        return cls(first=first, last=last, ranks=_ranks(given.get("ranks", "0")), **switches)

    @property
    def steps(self) -> str:
        """The steps in words."""
        return f"step {self.first:,}" if self.first == self.last else (
            f"steps {self.first:,} to {self.last:,}"
        )  # fmt: skip

    @property
    def of_ranks(self) -> str:
        """The ranks in words."""
        if self.ranks is None:
            return "every rank"
        return f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"


def require_profile(
    stages: "Sequence[ResolvedStage]", words: str | None, *, submitted: bool = False
) -> list[str]:
    """Return what is profiled, a sentence a stage that is left to train; nothing without words.

    Raises ValueError if a stage does not have the steps or the ranks any more, or at all.
    """
    if words is None:
        return []
    request = ProfileRequest.of(words)
    left = [stage for stage in stages if not stage.is_done]
    if not left:
        names = " and ".join(stage.name for stage in stages)
        raise ValueError(
            f"--profile {words}: {names} {'has' if len(stages) == 1 else 'have'} all steps, so "
            "that nothing is trained and nothing profiled; leave it out, or name another --out"
        )
    for stage in left:
        size, taken = stage.layout.world_size, stage.steps_taken
        _require(stage.name, stage.steps, size, taken, request, words)
        if request.nsys:
            _require_nsys(stage, words, submitted=submitted)
    return [
        f"{request.steps} of {stage.name} {'are' if request.last > request.first else 'is'} "
        f"profiled on {request.of_ranks}, into {_shown(stage)}"
        for stage in left
    ]


def nsys_command(words: str | None, arguments: "Sequence[str] | None" = None) -> str:
    """Return the command line of nsys for this command; empty if it is not wanted."""
    if words is None or not ProfileRequest.of(words).nsys:
        return ""
    given = sys.argv[1:] if arguments is None else arguments
    own = ["longhaul", *(word for word in given if word != "--dryrun")]  # what shows the command
    return shlex.join(
        [
            "nsys", "profile", "--trace=cuda,nvtx", "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop", "--output=longhaul_%h_%p", *own,
        ]
    )  # fmt: skip


def _shown(stage: "ResolvedStage") -> Path:
    folder = stage.folder / FOLDER
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _steps(value: str) -> tuple[int, int]:
    first, colon, last = value.partition(":")
    if not _is_number(first) or (colon and not _is_number(last)):
        raise ValueError(
            f"--profile: steps={value} is not a range; expected steps=FIRST:LAST, both included, "
            "or steps=STEP, for example steps=5:8"
        )
    found = int(first), int(last or first)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(
            f"--profile: steps={value} is empty; steps are counted from 1 and the last is not "
            "before the first, for example steps=5:8"
        )
    return found


def _ranks(value: str) -> tuple[int, ...] | None:
    if value == "all":
        return None
    if not all(_is_number(rank) for rank in value.split(",")):
        raise ValueError(
            f"--profile: ranks={value} are not ranks; expected numbers such as ranks=0,1, or "
            "ranks=all"
        )
    return tuple(sorted({int(rank) for rank in value.split(",")}))


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal()


def require_profile_of(
    rows: "Sequence[Row]", run: Path, words: str | None, overrides: "Sequence[str]"
) -> None:
    """Raise ValueError as `require_profile`, before NeMo is loaded: for rows as they are.

    Where an override may change steps, ranks or places, only the resolved recipes are checked.
    """
    if words is None or any(word.startswith(MOVING) for word in overrides):
        return
    request = ProfileRequest.of(words)
    for row in rows:
        taken = steps_taken(stage_folder(run, row.stage_name) / "checkpoints")
        if taken < row.stage.steps:
            _require(row.name, row.stage.steps, row.layout.world_size, taken, request, words)


def _require(
    name: str, steps: int, size: int, taken: int, request: ProfileRequest, words: str
) -> None:
    if request.last > steps:
        raise ValueError(
            f"--profile {words}: {name} has {steps:,} steps and {request.last:,} is none of "
            f"them; expected steps from {taken + 1:,} to {steps:,}"
        )
    if request.first <= taken:
        raise ValueError(
            f"--profile {words}: {name} resumes with step {taken + 1:,} and step "
            f"{request.first:,} has been trained; expected steps from {taken + 1:,} to {steps:,}"
        )
    missing = [rank for rank in request.ranks or () if rank >= size]
    if missing:
        has = "rank 0 alone" if size == 1 else f"ranks 0 to {size - 1:,}"
        raise ValueError(
            f"--profile {words}: there is no rank {missing[0]:,}; {name} is trained by {has}"
        )


def _require_nsys(stage: "ResolvedStage", words: str, *, submitted: bool) -> None:
    if stage.layout.device == "cpu":
        raise ValueError(
            f"--profile {words}: nsys shows what a GPU does and {stage.name} is trained on CPU "
            "ranks; leave nsys out: PyTorch's trace is written on both"
        )
    if submitted:
        raise ValueError(
            f"--profile {words}: nsys has to start the ranks itself; leave nsys out, or run it "
            "with --executor local in an interactive allocation of one node"
        )
