# SPDX-License-Identifier: Apache-2.0
"""Verification card: the record of a passed rehearsal, with its command, machine and results.

`docs/cards/<ladder>.yaml` is the card of a ladder. The dataclasses below are the schema.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import yaml

from data.files.user_file import read_yaml
from data.files.whole import write_text
from recipes.spec.schema import decode

LOSS_TOLERANCE = 0.02
"""Relative: the text and the seeds are the same everywhere, the order of sums is not."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that the recipe states, and the one that was seen."""

    expected: float
    seen: float


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The training losses of a stage's first and last step."""

    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class StageSeen:
    """Settings and results of one stage."""

    name: str
    seq_length: int
    layout: dict[str, int]
    steps: Figure
    tokens_per_step: Figure
    first_rate: Figure
    loss: Losses
    heldout_loss: float


@dataclass(frozen=True, kw_only=True)
class VerificationCard:
    """One card. Raises ValueError for an invalid commit, command or figure."""

    ladder: str
    recipe: str
    command: str
    """As given, without output paths."""
    commit: str
    """All 40 digits; of the tree that was run, with ` and changes` if it had any."""
    date: date
    versions: dict[str, str]
    machine: dict[str, str]
    loss_tolerance: float
    """Relative, of another run's losses to these."""
    stages: list[StageSeen]
    checks: list[str]
    seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError for values that no rehearsal writes."""
        if not re.fullmatch(r"[0-9a-f]{40}( and changes)?", self.commit):
            raise ValueError(f"commit is {self.commit!r}; expected 40 hexadecimal digits")
        named = (["longhaul", "rehearse", self.recipe], ["longhaul", "rehearse", "--card"])
        if shlex.split(self.command)[:3] not in named:
            raise ValueError(f"command is {self.command!r}; expected to rehearse {self.recipe}")
        if len(self.stages) != 2:
            raise ValueError(f"a rehearsal has 2 stages, and the card {len(self.stages)}")
        if not 0 < self.loss_tolerance < 1:
            raise ValueError(f"loss_tolerance is {self.loss_tolerance}; it lies between 0 and 1")
        if not self.checks:
            raise ValueError("the card lists no checks")


def write(card: VerificationCard, path: Path) -> None:
    """Write a card atomically."""
    write_text(path, yaml.safe_dump(asdict(card), sort_keys=False, width=100))


def read(path: Path) -> VerificationCard:
    """Read a card; raise ValueError, with the place, if it does not fit the schema."""
    content = read_yaml(path)
    if isinstance(content, dict) and isinstance(day := content.get("date"), date):
        content["date"] = day.isoformat()  # YAML has dates
    return decode(VerificationCard, content, str(path))


def same_losses(card: VerificationCard, seen: Mapping[str, Losses]) -> list[str]:
    """Return a sentence for each loss that differs from the card's by more than its tolerance."""
    return [
        f"{stage.name}: the {name} loss is {theirs:.4f} and the card's {ours:.4f}"
        for stage in card.stages
        for name in ("first", "last")
        if abs((theirs := getattr(seen[stage.name], name)) - (ours := getattr(stage.loss, name)))
        > card.loss_tolerance * ours
    ]
