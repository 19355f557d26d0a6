# SPDX-License-Identifier: Apache-2.0
"""Results of an extension probe: the evaluations of its run, its training loss and the verdict.

RUN/probe.json    settings, readings of the three models, training, facts of the base, verdict
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.run_folder import BASE, Evaluation, base_evaluations, read_evaluation, read_steps
from recipes.rehearsal.extension import slope
from recipes.rehearsal.extension_verdict import Estimate, ProbeVerdict, Reading, verdict
from recipes.spec.extension_facts import ExtensionFact, counted
from recipes.spec.naming import stage_folder

RECORD = "probe.json"
PUBLISHED, UNTRAINED, TRAINED = "own rotation", "stage's rotation, untrained", "after the probe"


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What a probe saw."""

    name: str
    start: str
    native: int
    """Context in tokens that the weights were trained for."""
    length: int
    """Tokens of the windows."""
    documents: int
    readings: dict[str, Reading]
    steps: int
    tokens: int
    losses: tuple[float, ...]
    """Training loss of each step."""
    slope: tuple[float, float]
    """Of the last half of the steps, in nats per million tokens, and its standard error."""
    verdict: ProbeVerdict
    facts: tuple[ExtensionFact, ...]

    def content(self) -> dict[str, Any]:
        """Return everything in numbers, as `probe.json` has it."""
        return asdict(self) | {
            "facts_counted": counted(list(self.facts)),
            "gain_from_context": {
                name: asdict(Estimate.of(reading.gain())) for name, reading in self.readings.items()
            },
            "cost_beyond_native": {
                name: asdict(Estimate.of(reading.cost_beyond(self.native)))
                for name, reading in self.readings.items()
            },
        }


def probed(
    run: Path, stage: str, *, start: str, native: int, facts: Sequence[ExtensionFact]
) -> Probed:
    """Return what the run of a probe saw; raise ValueError if an evaluation is missing."""
    evaluations = _evaluations(run, stage)
    readings = {name: reading_of(found) for name, found in evaluations.items()}
    published = readings[PUBLISHED]
    untrained = readings.get(UNTRAINED, published)
    steps = read_steps(stage_folder(run, stage) / "metrics.jsonl")
    seen, losses, total = [], [], 0.0
    for step in steps:
        total += step.tokens
        seen.append(total / 1e6)
        losses.append(step.loss)
    half = len(losses) // 2
    trained = evaluations[TRAINED]
    return Probed(
        name=stage,
        start=start,
        native=native,
        length=trained.eval_length,
        documents=trained.documents,
        readings=readings,
        steps=len(steps),
        tokens=round(total),
        losses=tuple(losses),
        slope=slope(seen[half:], losses[half:]),
        verdict=verdict(published, untrained, readings[TRAINED], native),
        facts=tuple(facts),
    )


def _evaluations(run: Path, stage: str) -> dict[str, Evaluation]:
    """Return the evaluations by model; the untrained one is left out if rotations are the same."""
    found = {TRAINED: read_evaluation(run, stage)}
    for base in base_evaluations(run):
        if base.stage == BASE:
            found[PUBLISHED] = base
        elif base.base is not None and stage in base.base.stages:
            found[UNTRAINED] = base
    ordered = {name: found[name] for name in (PUBLISHED, UNTRAINED, TRAINED) if found.get(name)}
    for name in (PUBLISHED, TRAINED):
        if name not in ordered:
            raise ValueError(f"{run} has no evaluation of the model {name}; run the probe again")
    return {name: each for name, each in ordered.items() if each is not None}


def reading_of(evaluation: Evaluation) -> Reading:
    """Return the losses of one model by context and by range of positions."""
    gain = evaluation.context_gain
    if gain is None:
        raise ValueError(f"the evaluation of {evaluation.stage} has no gain from context")
    return Reading(
        contexts=gain.contexts,
        by_context=gain.by_document,
        ranges=tuple((row.start, row.stop, row.by_document) for row in evaluation.ranges),
    )


def sentences(seen: Probed) -> list[str]:
    """Return the lines under the table: what training did, and the verdict with its reasons."""
    rise, error = seen.slope
    course = "" if math.isnan(rise) else f"; its last half {rise:+.3g} +- {error:.2g} nats per 1M"
    said = [
        f"training: {seen.steps:,} steps of {seen.tokens // max(1, seen.steps):,} tokens, loss "
        f"{seen.losses[0]:.3f} to {seen.losses[-1]:.3f}{course}",
        f"verdict: {seen.verdict.word}",
        f"  {seen.verdict.why}",
    ]
    if not seen.verdict.certain:
        said.append(
            f"  not certain: {seen.documents} documents leave it open on which side of the limit "
            "it is; take more with --documents"
        )
    if not seen.verdict.same_tokens:
        said.append(
            "  by position, not by the same tokens: the length leaves no window within the native "
            "context"
        )
    if seen.verdict.word != "extends readily" or seen.facts:
        sentence = counted(list(seen.facts))
        said.append(f"the base: {sentence or 'none of the facts that are known to make it hard'}")
        said += [f"  {fact.words}" for fact in seen.facts]
    return said


def table_rows(seen: Probed) -> list[list[str]]:
    """Return the rows of the table: a title, then a value for each reading."""
    readings = list(seen.readings.values())
    rows = []
    for at, (start, stop, _) in enumerate(readings[0].ranges):
        means = [Estimate.of(reading.ranges[at][2]).mean for reading in readings]
        beyond = " *" if start >= seen.native else ""
        rows.append([f"{start:,}-{stop:,}{beyond}", *(f"{mean:.3f}" for mean in means)])
    gains = [str(Estimate.of(reading.gain())) for reading in readings]
    costs = [str(Estimate.of(reading.cost_beyond(seen.native))) for reading in readings]
    return [
        *rows,
        [f"gain from context, {readings[0].contexts[0]:,} to {seen.length:,}", *gains],
        ["cost of reading beyond native", *costs],
    ]
