# SPDX-License-Identifier: Apache-2.0
"""Checks whether a jump of the loss at the switch of a stage is a fault, one per function.

Normal for an extension: the loss of the first steps up by several nats and gradient norms of
hundreds, back within some 50 steps (Long-Context-Data-Engineering issue 13: loss 5.5 and norm 249
on the first step of an extension, 2.2 by step 50).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from eval.run_folder import Step
from longhaul.doctor.stage_files import StageFacts
from recipes.spec.naming import counted

Level = Literal["ok", "warning", "failure"]
RECOVERY, WINDOW = 50, 5
"""Steps within which a jump is over; steps whose mean loss is a level."""
BACK, JUMP, OF_RANDOM = 0.1, 8.0, 0.97
"""Nats within which levels are equal; nats of a jump; share of ln(vocabulary): random weights."""
NORM_AFTER, FEW = 10.0, 3
"""Largest ratio to the gradient norm of the stage before; steps that are too few to judge."""
SPIKE, SPREAD = 0.5, 8.0
"""A later spike: nats above the steps before it, and times their spread."""
BEHIND = 20
"""Steps that a later spike is compared with."""
FORGOTTEN = 0.1
"""Nats by which a range of positions may get worse over a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeCheck:
    """The result of one check."""

    level: Level
    words: str
    do: str = ""
    """What to do if the level is not ok."""


def checks(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Yield every check of a stage, with the stage before it if there is one."""
    steps = stage.results.steps
    yield from lines(stage)
    yield from finite(steps)
    if all(math.isfinite(step.loss) for step in steps):
        yield from jump(stage, before)
        yield from recovery(stage, before)
        yield from later(steps)
    yield from norms(stage, before)
    yield from rate(stage, before)
    yield from tokenizer(stage, before)
    yield from rotation(stage)
    yield from data(stage, before)
    yield from positions(stage, before)


def lines(stage: StageFacts) -> Iterator[SpikeCheck]:
    """Check that metrics.jsonl has no bytes that a run never writes."""
    if stage.garbled:
        yield SpikeCheck(
            level="warning",
            words="metrics.jsonl has NULs or bytes that are not UTF-8 in "
            f"{counted(len(stage.garbled), 'line')}, first in line {stage.garbled[0]}; not read",
            do="a node that loses power leaves such bytes; a resumed run writes the steps again",
        )


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


def later(steps: Sequence[Step]) -> Iterator[SpikeCheck]:
    """Check for spikes after the switch."""
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


def norms(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Check gradient norms: large at first, ordinary after."""
    known = [step for step in stage.results.steps if not math.isnan(step.grad_norm)]
    if not known:
        return
    if any(math.isinf(step.grad_norm) for step in known):
        yield SpikeCheck(
            level="failure",
            words="a gradient norm is infinite",
            do="resume from the checkpoint before it, with a lower rate",
        )
        return
    until = horizon(stage)
    largest = max(known[:until], key=lambda step: step.grad_norm)
    after = [step.grad_norm for step in known[until:]]
    usual = [step.grad_norm for step in before.results.steps[-BEHIND:]] if before else []
    usual = [norm for norm in usual if math.isfinite(norm)]
    bound = NORM_AFTER * max(median(usual) if usual else 1.0, 0.1)
    if after and median(after) > bound:
        yield SpikeCheck(
            level="failure",
            words=f"the gradient norm is still {median(after):.3g} after step {until}",
            do="hundreds are normal only on the first steps; lower the rate, and look at the "
            "rotation below",
        )
    else:
        yield SpikeCheck(
            level="ok",
            words=f"the gradient norm is at most {largest.grad_norm:.3g} (step {largest.step}); "
            "hundreds are normal on the first steps, and are clipped",
        )


def rate(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Check that the first step ran at the first rate of this stage's warm-up."""
    first, planned = stage.results.steps[0], stage.first_rate
    if first.step != 1 or math.isnan(first.lr) or planned is None:
        return
    if math.isclose(first.lr, planned, rel_tol=1e-3):
        yield SpikeCheck(
            level="ok", words=f"the first step ran at {first.lr:.3g}, of the stage's own warm-up"
        )
        return
    last = before.results.steps[-1].lr if before and before.results.steps else math.nan
    carried = math.isclose(first.lr, last, rel_tol=1e-2)
    yield SpikeCheck(
        level="failure",
        words=f"the first step ran at rate {first.lr:.3g} and the stage's warm-up begins at "
        f"{planned:.3g}" + ("; it is the rate the stage before ended at" if carried else ""),
        do="the schedule was carried over or overridden: start from weights alone "
        "(resume.start), into a folder without checkpoints",
    )


def tokenizer(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Check that the tokenizer is that of the start."""
    mine = stage.tokenizer
    theirs = stage.start["tokenizer"] if stage.start else before.tokenizer if before else None
    if mine is None or theirs is None:
        return
    if mine == theirs:
        yield SpikeCheck(level="ok", words="the tokenizer is that of the start")
    else:
        yield SpikeCheck(
            level="failure",
            words="the tokenizer differs from that of the start",
            do="prepare the store with the tokenizer of the checkpoint: `longhaul prepare "
            "--tokenizer`",
        )


def rotation(stage: StageFacts) -> Iterator[SpikeCheck]:
    """Check that the checkpoint was written under the rotation that the stage states."""
    record, marker = stage.results.record, stage.marker
    if marker is None or "rope" not in marker:
        return
    described: dict[str, Any] = {} if record is None else record.rope
    stated = stage.rotation
    if stated is None and not described:
        return
    if stated is None:
        differing = _of_description(described, marker["rope"])
    else:
        differing = _differing(stated, marker["rope"])
    temperature = marker.get("temperature")
    if temperature is not None and described.get("temperature", temperature) != temperature:
        differing.append("temperature")
    if differing:
        yield SpikeCheck(
            level="failure",
            words=f"the checkpoint's rotation differs from the stage's: {' and '.join(differing)}",
            do="the checkpoint was trained under another rotation; run the stage into a folder of "
            "its own",
        )
    else:
        yield SpikeCheck(level="ok", words="the checkpoint has the stage's rotation")


def _differing(stated: dict[str, Any], written: dict[str, Any]) -> list[str]:
    """Return the names whose values differ; neither has values that are at their defaults."""
    names = [*stated, *(name for name in written if name not in stated)]
    return [name for name in names if stated.get(name) != written.get(name)]


def _of_description(described: dict[str, Any], written: dict[str, Any]) -> list[str]:
    """Return the names that differ from stage.json, which names `before` and lacks divisors."""
    short = {name: value for name, value in written.items() if name in described}
    if isinstance(described.get("before"), str):
        short["before"] = (written.get("before") or {}).get("method")
    return [name for name in short if described[name] != short[name]]


def samples(stage: StageFacts) -> Iterator[SpikeCheck]:
    """Check that each step reads the samples after those of the step before, resumes included."""
    lasts = {0: -1}
    """Last sample of each step; a resume from an earlier step writes its steps again."""
    latest = 0
    for step, first, last in stage.samples:
        if step - 1 in lasts:
            due = lasts[step - 1] + 1
            if first != due:
                yield _out_of_order(step, first, due)
                return
        elif latest < step and first <= lasts[latest]:  # lines between were cut
            yield _out_of_order(step, first, lasts[latest] + 1)
            return
        lasts[step], latest = last, step
    if stage.samples:
        yield SpikeCheck(
            level="ok", words="each step reads the samples after those of the step before"
        )


def _out_of_order(step: int, first: int, due: int) -> SpikeCheck:
    if first < due:
        return SpikeCheck(
            level="failure",
            words=f"step {step} reads samples that earlier steps have read: it begins at {first:,} "
            f"instead of {due:,}",
            do="the loader started over after a resume; go back to the checkpoint before it",
        )
    return SpikeCheck(
        level="failure",
        words=f"step {step} skips {first - due:,} samples: it begins at {first:,} instead of "
        f"{due:,}",
        do="the loader went ahead at a resume; go back to the checkpoint before it",
    )


def data(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Check the samples of the steps, and the store."""
    yield from samples(stage)
    manifest, spent = stage.manifest(), sum(stage.results.step_tokens())
    if manifest is not None and math.isfinite(spent) and spent > manifest.train.tokens:
        yield SpikeCheck(
            level="warning",
            words=f"{spent:,.0f} tokens were trained on and the store has "
            f"{manifest.train.tokens:,}: it was read {spent / manifest.train.tokens:.1f} times",
            do="prepare more documents, or stop the stage earlier",
        )
    stores = [one.of_recipe("data.store") for one in (stage, before) if one is not None]
    if len(stores) == 2 and None not in stores and stores[0] != stores[1]:
        yield SpikeCheck(
            level="warning",
            words=f"the stage reads {stores[0]}, the one before {stores[1]}",
            do="the level of the loss depends on the mix of data; compare held-out loss instead",
        )


def positions(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Check held-out loss at the positions that the stage before was evaluated at too."""
    mine = stage.results.evaluation
    theirs = before.results.evaluation if before else None
    if mine is None or theirs is None:
        return
    known = {(one.start, one.stop): one.loss for one in theirs.ranges}
    worse = [
        (one, one.loss - known[one.start, one.stop])
        for one in mine.ranges
        if (one.start, one.stop) in known
    ]
    bad = [(one, by) for one, by in worse if not by <= FORGOTTEN]
    if bad:
        one, by = max(bad, key=lambda pair: pair[1])
        yield SpikeCheck(
            level="warning",
            words=f"held-out loss at positions {one.start:,} to {one.stop:,} is {by:.2f} nats "
            "worse than before the stage",
            do="short documents are forgotten: give them a larger share, or lower the rate",
        )
    elif worse:
        yield SpikeCheck(level="ok", words="held-out loss is no worse at any range known before")
