# SPDX-License-Identifier: Apache-2.0
"""`--profile`: what its words mean, whether a stage can be profiled so, and the callback for it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.checkpoints.marker import steps_taken
from recipes.spec.naming import stage_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import nemo_run

    from recipes.resolved.stage import ResolvedStage
    from recipes.shipped.row import Row

FOLDER = "profile"
"""Folder of a stage that its profiles are written to."""
EXPECTED = "'steps=5:8', or with further words 'steps=5:8 ranks=0,1 nsys' (or ranks=all)"
WORD = re.compile(
    r"(?P<steps>steps)=(?P<first>[0-9]+)(:(?P<last>[0-9]+))?|"
    r"(?P<ranks>ranks)=(all|(?P<numbers>[0-9]+(,[0-9]+)*))|(?P<nsys>nsys)"
)
MOVING = ("trainer.", "log.", "resume.")
"""Overrides that may change the steps, ranks or places of a stage."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Steps of a stage, counted from 1 and both included, and the ranks that are profiled."""

    first: int
    last: int
    ranks: tuple[int, ...] | None
    """None: every rank."""
    nsys: bool

    @classmethod
    def of(cls, words: str) -> "ProfileRequest":
        """Return what the words of --profile mean; raise ValueError for others."""
        given: dict[str, re.Match[str]] = {}
        for word in words.split():
            if word in ("shapes", "stack"):
                raise ValueError(
                    f"--profile: {word} is not in this release; docs/profiling.md says where "
                    "torch.profiler takes it"
                )
            found = WORD.fullmatch(word)
            kind = "" if found is None else found["steps"] or found["ranks"] or found["nsys"]
            if found is None or kind in given:
                what = "is given twice" if found else "is unknown"
                raise ValueError(f"--profile: {word!r} {what}; expected {EXPECTED}")
            given[kind] = found
        if "steps" not in given:
            raise ValueError(f"--profile is {words!r} and names no steps; expected {EXPECTED}")
        first = int(given["steps"]["first"])
        last = int(given["steps"]["last"] or first)
        if not 1 <= first <= last:
            raise ValueError(
                f"--profile: {given['steps'][0]} is empty; steps are counted from 1 and the last "
                "is not before the first, for example steps=5:8"
            )
        numbers = given["ranks"]["numbers"] if "ranks" in given else "0"
        ranks = None if numbers is None else tuple(sorted({*map(int, numbers.split(","))}))
        return cls(first=first, last=last, ranks=ranks, nsys="nsys" in given)

    def __str__(self) -> str:
        """Return the steps and ranks in words."""
        ranks = "all" if self.ranks is None else ",".join(map(str, self.ranks))
        return f"steps {self.first:,} to {self.last:,} on ranks {ranks}"


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
        raise ValueError(
            f"--profile {words}: {' and '.join(stage.name for stage in stages)} has all steps, so "
            "that nothing is trained and nothing profiled; leave it out, or name another --out"
        )
    for stage in left:
        _require(stage.name, stage.steps, stage.layout.world_size, stage.steps_taken, words)
        if request.nsys and stage.layout.device == "cpu":
            raise ValueError(
                f"--profile {words}: nsys shows what a GPU does and {stage.name} is trained on CPU "
                "ranks; leave nsys out: PyTorch's trace is written on both"
            )
        if request.nsys and submitted:
            raise ValueError(
                f"--profile {words}: nsys has to start the ranks itself; leave nsys out, or run it "
                "with --executor local in an interactive allocation of one node"
            )
    return [f"{stage.name}: {request} are profiled into {stage.folder / FOLDER}" for stage in left]


def require_profile_of(
    rows: "Sequence[Row]", run: Path, words: str | None, overrides: "Sequence[str]"
) -> None:
    """Raise ValueError as `require_profile`, before NeMo is loaded: for rows as they are.

    Where an override may change steps, ranks or places, only the resolved recipes are checked.
    """
    if words is None or any(word.startswith(MOVING) for word in overrides):
        return
    for row in rows:
        taken = steps_taken(stage_folder(run, row.stage_name) / "checkpoints")
        if taken < row.stage.steps:
            _require(row.name, row.stage.steps, row.layout.world_size, taken, words)


def _require(name: str, steps: int, size: int, taken: int, words: str) -> None:
    request = ProfileRequest.of(words)
    if not taken < request.first <= request.last <= steps:
        trained = f", of which {taken:,} are trained" if taken else ""
        raise ValueError(
            f"--profile {words}: {name} has {steps:,} steps{trained}; expected steps from "
            f"{taken + 1:,} to {steps:,}"
        )
    missing = [rank for rank in request.ranks or () if rank >= size]
    if missing:
        raise ValueError(
            f"--profile {words}: there is no rank {missing[0]:,}; {name} is trained by ranks 0 to "
            f"{size - 1:,}"
        )


def add_profile(recipe: "nemo_run.Partial", config: str, words: str) -> None:
    """Add the callback that profiles what the words of --profile name, next to the recipe file.

    The one that compares the kernel times of GPUs is taken out on every rank. CUPTI passes its
    records to one reader in a process: PyTorch's profiler would become it, lose the kernels outside
    of `training_step`, where that callback turns records off, and keep its buffers afterwards; and
    below nsys a process must not call CUPTI.
    """
    import nemo_run

    from custom_modules.callbacks.profile_steps import ProfileSteps
    from custom_modules.callbacks.stragglers import Stragglers

    request = ProfileRequest.of(words)
    kept = [
        one
        for one in recipe.trainer.callbacks
        if getattr(one, "__fn_or_cls__", None) is not Stragglers
    ]
    profile = nemo_run.Config(
        ProfileSteps,
        folder=str(Path(config).parent / FOLDER),
        first=request.first,
        last=request.last,
        ranks=None if request.ranks is None else list(request.ranks),
        nsys=request.nsys,
    )
    recipe.trainer.callbacks = [*kept, profile]
