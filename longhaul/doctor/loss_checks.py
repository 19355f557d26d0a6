# SPDX-License-Identifier: Apache-2.0
"""Checks of the loss of a stage: its jump at the switch, its recovery, and what follows.

Normal for an extension: the loss of the first steps up by several nats, back within some 50 steps
(Long-Context-Data-Engineering issue 13: loss 5.5 on the first step of an extension, 2.2 by step
50).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from eval.run_folder import Step
from longhaul.doctor.stage_files import StageFacts

Level = Literal["ok", "warning", "failure"]
RECOVERY, WINDOW = 50, 5
"""Steps within which a jump is over; steps whose mean loss is a level."""
BACK, JUMP, OF_RANDOM = 0.1, 8.0, 0.97
"""Nats within which levels are equal; nats of a jump; share of ln(vocabulary): random weights."""
FEW = 3
"""Steps that are too few to judge."""
SPIKE, SPREAD = 0.5, 8.0
"""A later spike: nats above the steps before it, and times their spread."""
BEHIND = 20
"""Steps that a later spike is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeCheck:
    """The result of one check."""

    level: Level
    words: str
    do: str = ""
    """What to do if the level is not ok."""


def finite(steps: Sequence[Step]) -> Iterator[SpikeCheck]:
    """Check that every loss is a number."""
    broken = [step.step for step in steps if not math.isfinite(step.loss)]
    if broken:
        yield SpikeCheck(
            level="failure",
            words=f"the loss is not a number in {len(broken)} steps, first at step {broken[0]}",
            do="resume from the checkpoint before it; look at that step's samples, at the rate, "
            "and for a rank whose GPU computes wrongly",
        )
    else:
        yield SpikeCheck(level="ok", words=f"the loss is a number in all {len(steps)} steps")


def level_of(stage: StageFacts | None) -> float | None:
    """Return the loss that a stage ended at."""
    if stage is None:
        return None
    losses = [step.loss for step in stage.results.steps if math.isfinite(step.loss)]
    return fmean(losses[-2 * WINDOW :]) if losses else None


def jump(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Check the first loss against the stage before and against random weights."""
    first, level = stage.results.steps[0].loss, level_of(before)
    vocab = stage.of_recipe("model.config.vocab_size")
    random = math.log(vocab) if isinstance(vocab, int) and vocab > 1 else math.inf
    warm = before is not None or bool(stage.of_recipe("resume.start"))
    if warm and first > OF_RANDOM * random:
        yield SpikeCheck(
            level="failure",
            words=f"the first loss is {first:.2f}, that of random weights ({random:.2f})",
            do="the weights of the start were not loaded, or are of another tokenizer: look at "
            "resume.start, and at the log for the checkpoint that was loaded",
        )
    elif level is None:
        yield SpikeCheck(
            level="ok", words=f"the first loss is {first:.2f}; there is no stage before it"
        )
    elif first - level > JUMP:
        yield SpikeCheck(
            level="warning",
            words=f"the loss jumps by {first - level:.2f} nats at the switch, from {level:.2f}",
            do="extensions usually show less; look at the rotation: `longhaul rope`",
        )
    else:
        yield SpikeCheck(
            level="ok",
            words=f"the loss goes from {level:.2f} to {first:.2f} at the switch; up to several "
            "nats are normal for an extension",
        )


def horizon(stage: StageFacts) -> int:
    """Return the step by which a jump is over: the warm-up's end, at least `RECOVERY`."""
    return max(RECOVERY, stage.warmup_steps or 0)


def recovery(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Check that the loss comes back within the warm-up."""
    steps, until = stage.results.steps, horizon(stage)
    if len(steps) < FEW:
        yield SpikeCheck(level="ok", words=f"{len(steps)} steps are too few to judge recovery")
        return
    losses = [step.loss for step in steps]
    early = losses[:until]
    third = max(1, len(early) // 3)
    head, tail = fmean(early[:third]), fmean(early[-third:])
    level = level_of(before)
    back = _back_at(steps, math.inf if level is None else level + BACK)
    if tail > head + BACK:
        yield SpikeCheck(
            level="failure",
            words=f"the loss rises over the first {len(early)} steps, {head:.2f} to {tail:.2f}",
            do="lower the peak rate (optim.config.lr), or warm up longer "
            "(optim.lr_scheduler.warmup_ratio); then look at the checks below",
        )
    elif level is None:
        falls = "falls" if tail < head else "stays"
        yield SpikeCheck(
            level="ok", words=f"the loss {falls}, {head:.2f} to {tail:.2f}, after that"
        )
    elif back is not None:
        yield SpikeCheck(level="ok", words=f"the loss is back at {level:.2f} by step {back}")
    elif len(steps) < until:
        yield SpikeCheck(
            level="warning",
            words=f"the loss is {fmean(losses[-WINDOW:]):.2f}, was {level:.2f} before, and falls",
            do=f"look again at step {until}",
        )
    else:
        other = before is not None and before.of_recipe("data.store") != stage.of_recipe(
            "data.store"
        )
        yield SpikeCheck(
            level="warning" if other else "failure",
            words=f"the loss is {fmean(losses[-WINDOW:]):.2f} after {len(steps)} steps and was "
            f"{level:.2f} before the switch"
            + ("; the stage reads another store, whose level may differ" if other else ""),
            do="look at the rotation, the tokenizer and the start below; if they are ok, at "
            "held-out loss by position: `longhaul evaluate`",
        )


def _back_at(steps: Sequence[Step], level: float) -> int | None:
    """Return the first step at which the mean of a window is at a level or below."""
    for end in range(1, len(steps) + 1):
        if fmean(step.loss for step in steps[max(0, end - WINDOW) : end]) <= level:
            return steps[end - 1].step
    return None


def later(stage: StageFacts) -> Iterator[SpikeCheck]:
    """Check for a rise and for spikes after the switch."""
    steps = stage.results.steps
    risen = list(_rise(stage))
    if risen:
        yield from risen
        return
    found = []
    for place in range(max(BEHIND, RECOVERY), len(steps)):
        behind = [step.loss for step in steps[place - BEHIND : place]]
        middle = median(behind)
        spread = median(abs(loss - middle) for loss in behind)
        if steps[place].loss > middle + max(SPIKE, SPREAD * spread):
            found.append(steps[place].step)
    if found:
        yield SpikeCheck(
            level="warning",
            words=f"the loss spikes later, at step {', '.join(map(str, found[:5]))}"
            + (f" and {len(found) - 5} more" if len(found) > 5 else ""),
            do="a spike that falls back needs no action; if spikes are frequent, lower the rate, "
            "or look at the samples of those steps (metrics.jsonl)",
        )


def _rise(stage: StageFacts) -> Iterator[SpikeCheck]:
    """Check that the loss does not end far above its lowest level."""
    steps, width = stage.results.steps, 2 * WINDOW
    if len(steps) < horizon(stage) + width:
        return
    losses = [step.loss for step in steps]
    levels = {end: fmean(losses[end - width : end]) for end in range(width, len(steps) + 1)}
    lowest = min(levels, key=lambda end: levels[end])
    last = levels[len(steps)]
    if last > levels[lowest] + SPIKE:
        yield SpikeCheck(
            level="failure",
            words=f"the loss diverges: it rises from {levels[lowest]:.2f} at step "
            f"{steps[lowest - 1].step} to {last:.2f} at step {steps[-1].step}",
            do="resume from a checkpoint before the rise with a lower peak rate (optim.config.lr)",
        )
