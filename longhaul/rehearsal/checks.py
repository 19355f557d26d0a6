# SPDX-License-Identifier: Apache-2.0
"""Checks of a rehearsal: planned values compared with the contents of the run folder."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from custom_modules.checkpoints.index import CheckpointError
from eval.run_folder import Step, read_evaluation, read_steps
from recipes.checkpoints.marker import checkpoint_facts, newest_checkpoint
from recipes.spec.naming import stage_folder

WEIGHT_SUMS = "weight_sums.json"
"""File of a stage with the sums of its weights before the first step and after the last."""
SPREAD = 2.0
"""Standard deviation of the loss from token to token, in nats; that of a batch's mean follows."""
SAME_SUM = 1e-9
"""Relative difference of two sums of the same weights, added up in another order."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The values that the resolved recipe of a stage plans."""

    name: str
    seq_length: int
    steps: int
    tokens_per_step: int
    first_rate: float
    rope: dict[str, Any]
    layout: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RehearsalCheck:
    """The result of one check, in words with the values seen."""

    holds: bool
    words: str


def verdict(run: Path, planned: Sequence[Planned]) -> list[RehearsalCheck]:
    """Return the checks of both stages, of the hand-over and of the evaluation."""
    before, after = planned
    return [
        *_of_stage(run, before, from_random=True),
        *_of_stage(run, after, from_random=False),
        *_hand_over(run, before, after),
        _evaluation(run, before, after),
    ]


def steps_of(run: Path, stage: Planned) -> tuple[Step, ...]:
    """Return the steps that a stage has taken."""
    return read_steps(stage_folder(run, stage.name) / "metrics.jsonl")


def _of_stage(run: Path, stage: Planned, *, from_random: bool) -> Iterator[RehearsalCheck]:
    steps = steps_of(run, stage)
    if [step.step for step in steps] != list(range(1, stage.steps + 1)):
        yield RehearsalCheck(
            holds=False, words=f"{stage.name}: {len(steps)} steps were taken of {stage.steps}"
        )
        return
    yield _losses(stage, [step.loss for step in steps], from_random=from_random)
    yield RehearsalCheck(
        holds=math.isclose(steps[0].lr, stage.first_rate, rel_tol=1e-6),
        words=f"{stage.name}: the first step ran at rate {steps[0].lr:.3g}, of the recipe's own "
        f"warm-up {stage.first_rate:.3g}",
    )
    counts = sorted({step.tokens for step in steps})
    yield RehearsalCheck(
        holds=counts == [stage.tokens_per_step],
        words=f"{stage.name}: {' and '.join(f'{count:,.0f}' for count in counts)} tokens a step "
        f"over all ranks, of {stage.tokens_per_step:,}",
    )
    yield _checkpoint(run, stage)


def _losses(stage: Planned, losses: list[float], *, from_random: bool) -> RehearsalCheck:
    """Return whether losses fall or, from trained weights, do not rise beyond their noise."""
    third = max(1, len(losses) // 3)
    first, last = fmean(losses[:third]), fmean(losses[-third:])
    noise = 2 * SPREAD * math.sqrt(2 / (third * stage.tokens_per_step))
    if not all(map(math.isfinite, losses)):
        said, holds = "not finite", False
    elif last < first or len(losses) == 1:
        said, holds = "falling", True
    elif last < first + noise and not from_random:
        said, holds = f"level within the noise of its batches, {noise:.2f}", True
    else:
        said, holds = "not falling", False
    words = f"{stage.name}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps, {said}"
    return RehearsalCheck(holds=holds, words=words)


def _checkpoint(run: Path, stage: Planned) -> RehearsalCheck:
    try:
        found = newest_checkpoint(stage_folder(run, stage.name) / "checkpoints")
        facts = None if found is None else checkpoint_facts(found)
    except CheckpointError as error:
        return RehearsalCheck(holds=False, words=f"{stage.name}: {error}")
    if facts is None:
        return RehearsalCheck(holds=False, words=f"{stage.name}: there is no complete checkpoint")
    wrong = [
        f"{name} {facts.get(name)} instead of {value}"
        for name, value in (
            ("step", stage.steps),
            ("seq_length", stage.seq_length),
            ("rope", stage.rope),
        )
        if facts.get(name) != value
    ]
    if wrong:
        return RehearsalCheck(
            holds=False, words=f"{stage.name}: its checkpoint has {' and '.join(wrong)}"
        )
    return RehearsalCheck(
        holds=True,
        words=f"{stage.name}: its checkpoint is complete at step {stage.steps}, with the stage's "
        "length and rotation",
    )


def _hand_over(run: Path, before: Planned, after: Planned) -> Iterator[RehearsalCheck]:
    written, loaded = _sums(run, before).get("end"), _sums(run, after).get("start")
    if not written or not loaded:
        yield RehearsalCheck(
            holds=False, words="hand-over: a stage has left no sums of its weights"
        )
        return
    differing = [
        name
        for name in {**written, **loaded}
        if name not in written or name not in loaded or not _same(written[name], loaded[name])
    ]
    under = f"written under {_layout(before)}, loaded under {_layout(after)}"
    yield RehearsalCheck(
        holds=not differing,
        words=f"hand-over: {len(loaded) - len(differing)} of {len(written)} weights arrived as "
        f"they were, {under}" + (f"; not {differing[0]}" if differing else ""),
    )
    first, second = steps_of(run, before), steps_of(run, after)
    if not first or not second:
        return
    begun = second[0].loss
    stayed = fmean(
        step.loss for step in second[1:] or second
    )  # the optimizer's weights arrived too
    yield RehearsalCheck(
        holds=max(begun, stayed) < first[0].loss,
        words=f"hand-over: {after.name} begins at {begun:.3f} and continues at {stayed:.3f}, where "
        f"random weights had {first[0].loss:.3f}",
    )


def _same(one: list[float], other: list[float]) -> bool:
    """Return whether two pairs of sums are of the same weights; the second bounds the first."""
    scale = math.sqrt(max(one[1], other[1]))
    return all(
        math.isclose(a, b, rel_tol=SAME_SUM, abs_tol=SAME_SUM * scale)
        for a, b in zip(one, other, strict=True)
    )


def _sums(run: Path, stage: Planned) -> dict[str, dict[str, list[float]]]:
    path = stage_folder(run, stage.name) / WEIGHT_SUMS
    content: dict[str, dict[str, list[float]]] = {}
    if path.is_file():
        content = json.loads(path.read_text())
    return content


def _layout(stage: Planned) -> str:
    words = [f"{kind.upper()}{size}" for kind, size in stage.layout.items() if size > 1]
    return " ".join(words) or "one rank"


def heldout_loss(run: Path, stage: Planned) -> float:
    """Return the mean loss of held-out documents over all positions; NaN if there is none."""
    found = read_evaluation(run, stage.name)
    return math.nan if found is None or not found.by_position else fmean(found.by_position.loss)


def _evaluation(run: Path, before: Planned, after: Planned) -> RehearsalCheck:
    first, second = heldout_loss(run, before), heldout_loss(run, after)
    if not (math.isfinite(first) and math.isfinite(second)):
        return RehearsalCheck(holds=False, words="evaluation: a stage has no finite held-out loss")
    return RehearsalCheck(
        holds=second < first,
        words=f"evaluation: held-out loss by position {first:.3f} after {before.name}, "
        f"{second:.3f} after {after.name}",
    )
