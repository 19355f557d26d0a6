# SPDX-License-Identifier: Apache-2.0
"""Checks whether a jump of the loss at the switch of a stage is a fault, one per function.

Normal for an extension: the loss of the first steps up by several nats and gradient norms of
hundreds, back within some 50 steps (Long-Context-Data-Engineering issue 13: loss 5.5 and norm 249
on the first step of an extension, 2.2 by step 50).
"""

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from longhaul.doctor.loss_checks import (
    BEHIND,
    SpikeCheck,
    finite,
    horizon,
    jump,
    later,
    recovery,
)
from longhaul.doctor.stage_files import StageFacts
from recipes.spec.naming import counted

NORM_AFTER = 10.0
"""Largest ratio to the gradient norm of the stage before."""
FORGOTTEN = 0.1
"""Nats by which a range of positions may get worse over a stage."""


def checks(stage: StageFacts, before: StageFacts | None) -> Iterator[SpikeCheck]:
    """Yield every check of a stage, with the stage before it if there is one."""
    steps = stage.results.steps
    yield from lines(stage)
    yield from finite(steps)
    if all(math.isfinite(step.loss) for step in steps):
        yield from jump(stage, before)
        yield from recovery(stage, before)
        yield from later(stage)
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
    largest = max(known, key=lambda step: step.grad_norm)
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
    elif after and max(after) > bound:
        peak = max(known[until:], key=lambda step: step.grad_norm)
        yield SpikeCheck(
            level="warning",
            words=f"the gradient norm is {peak.grad_norm:.3g} at step {peak.step}, long after the "
            "switch",
            do="it is clipped; if it returns, lower the rate, or look at the samples of that step "
            "(metrics.jsonl)",
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
