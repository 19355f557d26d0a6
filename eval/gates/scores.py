# SPDX-License-Identifier: Apache-2.0
"""Judge the scores of a stage on public suites by the thresholds of its gate.

RUN/eval/<stage>.suites.gate.json     whether the stage passed, and a sentence for each threshold

A score that is a share of samples (each counts 0 or 1) has Wilson's interval, any other the
interval of its standard error. A drop is against the model before the stage, on the same samples
under the same settings; its error is that of two independent scores, since the scores of single
samples are not kept: it is somewhat too large.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.gates.judgement import (
    FEW_SAMPLES,
    MET,
    NOT_MET,
    Judgement,
    Measure,
    pass_judgements,
    unmeasured,
    verdict,
)
from eval.run_folder import evaluation_path
from eval.suite_results import Group, SuiteResult, group_metrics, result_at, result_path
from eval.uncertainty import NORMAL, interval_width, prompts_to_tell, share_interval
from recipes.spec.gate import SuiteThreshold

EQUAL = 1e-6
"""Relative difference up to which a standard error is that of a share."""


@dataclass(frozen=True)
class Score:
    """A score of a model on a task or a group."""

    metric: str
    value: float
    error: float
    samples: int
    better_lower: bool = False

    @property
    def of_shares(self) -> bool:
        """Whether each sample counts 0 or 1, as the standard error tells."""
        if self.samples < 2 or not 0 <= self.value <= 1 or not math.isfinite(self.error):
            return False
        expected = math.sqrt(self.value * (1 - self.value) / (self.samples - 1))
        return math.isclose(self.error, expected, rel_tol=EQUAL, abs_tol=1e-12)

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95% interval; NaN if the error is not known."""
        if self.of_shares:
            return share_interval(round(self.value * self.samples), self.samples)
        reach = interval_width(self.samples) * self.error
        return self.value - reach, self.value + reach

    @property
    def own_error(self) -> float:
        """The standard error; that of Wilson's interval if all samples are equal."""
        if self.error or not self.of_shares:
            return self.error
        low, high = self.interval
        return (high - low) / (2 * NORMAL)

    @property
    def text(self) -> str:
        """The score with its standard error."""
        spread = f" +- {self.own_error:.3f}" if math.isfinite(self.own_error) else ""
        return f"{self.value:.3f}{spread}"


def pass_scores(
    run: Path,
    stage: str,
    before: str,
    thresholds: Sequence[SuiteThreshold],
    results: Sequence[SuiteResult],
    groups: Sequence[Group],
) -> None:
    """Judge the results of a stage; raise GateShutError if the next stage must not start."""
    judgements = judgements_of(run, stage, before, thresholds, results, groups)
    path = evaluation_path(run, stage).with_suffix(".suites.gate.json")
    pass_judgements(path, stage, {"thresholds": list(thresholds)}, judgements)


def judgements_of(
    run: Path,
    stage: str,
    before: str,
    thresholds: Sequence[SuiteThreshold],
    results: Sequence[SuiteResult],
    groups: Sequence[Group],
) -> list[Judgement]:
    """Return the judgements of a stage's results, compared with those of the model before it."""
    settings = [result.settings for result in results]
    paths = [result_path(run, before, of.task, of.length, of.limit) for of in settings]
    then = [found for path in paths if (found := result_at(path)) is not None]
    return list(judge_scores(thresholds, stage, results, before, then, groups))


def judge_scores(
    thresholds: Sequence[SuiteThreshold],
    stage: str,
    now: Sequence[SuiteResult],
    before: str,
    then: Sequence[SuiteResult],
    groups: Sequence[Group] = (),
) -> Iterator[Judgement]:
    """Yield the judgements of a stage's results, and of `then`, those of the model before it.

    `groups` have scores that are means over tasks.
    """
    for threshold in thresholds:
        score = _scored(threshold, now, groups)
        if isinstance(score, str):
            yield unmeasured(threshold.named, _bound(threshold), f"{stage} {score}")
            continue
        what = f"{score.metric} {score.text} of {threshold.task} over {score.samples:,} samples"
        if threshold.least is not None:
            yield _at_least(threshold.named, score, threshold.least, what)
        if threshold.drop is not None:
            yield _drop(threshold, threshold.drop, score, what, stage, now, before, then, groups)


def _bound(threshold: SuiteThreshold) -> float:
    bound = threshold.drop if threshold.least is None else threshold.least
    return math.nan if bound is None else bound


def _scored(
    threshold: SuiteThreshold, results: Sequence[SuiteResult], groups: Sequence[Group]
) -> Score | str:
    """Return the score that a threshold is of, or the end of a sentence on why there is none."""
    task, length = threshold.task, threshold.length
    what = task if length is None else f"{task} at {length:,} tokens"
    group = next((group for group in groups if group.name == task), None)
    own = _of_threshold(threshold, results, groups)
    if not own:
        return f"has no result of {what}"
    if group is None:
        rows = [
            (metric.filter, Score(metric.name, metric.value, metric.standard_error,
                                  own[0].samples, metric.higher_is_better is False))
            for metric in own[0].metrics
        ]  # fmt: skip
    else:
        means = group_metrics([group], own)
        lacking = {name for mean in means for name in mean.missing}
        lacking |= set(group.tasks) - {result.settings.task for result in own}
        if lacking:
            return f"has no score of {', '.join(sorted(lacking))}, which {what} is the mean of"
        lower = {
            metric.name
            for result in own
            for metric in result.metrics
            if metric.higher_is_better is False
        }
        rows = [
            (mean.filter, Score(mean.name, mean.value, mean.standard_error, mean.samples,
                                mean.name in lower))
            for mean in means
        ]  # fmt: skip
    for of_filter, score in rows:
        if threshold.metric in (None, score.metric, f"{score.metric},{of_filter}"):
            if not (math.isfinite(score.value) and score.samples):
                return f"has a score {score.metric} of {what} that is not a number"
            return score
    known = ", ".join(dict.fromkeys(score.metric for _, score in rows)) or "none"
    wanted = "score" if threshold.metric is None else f"score {threshold.metric}"
    return f"has no {wanted} of {what}; its scores are {known}"


def _of_threshold(
    threshold: SuiteThreshold, results: Sequence[SuiteResult], groups: Sequence[Group]
) -> list[SuiteResult]:
    tasks = next(
        (group.tasks for group in groups if group.name == threshold.task), (threshold.task,)
    )
    return [
        result
        for result in results
        if result.settings.task in tasks and result.settings.length == threshold.length
    ]


def _at_least(name: str, score: Score, least: float, what: str) -> Judgement:
    """Judge a score by its interval."""
    if score.better_lower:
        said = f"{score.metric} is better if lower, so least does not apply; state a drop"
        return unmeasured(name, least, said)
    said, passed = f"{what}, at least {least:g} required", score.value >= least
    if not score.of_shares:
        measure = Measure(
            value=score.value, error=score.error, counted=score.samples, few=FEW_SAMPLES
        )
        return measure.judged(name, least, said, least=True)
    low, high = score.interval
    would_do = None
    if low >= least or (least == 1 and score.value == 1):  # no number of samples shows more
        state = MET
    elif high < least:
        state = NOT_MET
    else:
        state, would_do = FEW_SAMPLES, prompts_to_tell(score.value, least)
    sentence = f"{said}: {verdict(state, score.samples, would_do)}"
    return Judgement(
        name, score.value, least, passed, sentence, state,
        score.own_error, score.samples, would_do,
    )  # fmt: skip


def _drop(
    threshold: SuiteThreshold,
    allowed: float,
    score: Score,
    what: str,
    stage: str,
    now: Sequence[SuiteResult],
    before: str,
    then: Sequence[SuiteResult],
    groups: Sequence[Group],
) -> Judgement:
    """Judge how much lower a score is than before, or higher if lower is better."""
    name = f"{threshold.named} drop"
    own = [_samples(result) for result in _of_threshold(threshold, now, groups)]
    same = [result for result in then if _samples(result) in own]
    earlier = _scored(threshold, same, groups)
    if isinstance(earlier, str):
        others = _of_threshold(threshold, then, groups)
        reason = "has results under other settings only" if others and not same else earlier
        said = f"{before}, the model before {stage}, {reason}, so there is no drop to judge"
        return unmeasured(name, allowed, said)
    change = score.value - earlier.value
    measure = Measure(
        value=change if score.better_lower else -change,
        error=math.hypot(score.own_error, earlier.own_error),
        counted=min(score.samples, earlier.samples),
        few=FEW_SAMPLES,
    )
    kind = "rise" if score.better_lower else "drop"
    said = (
        f"{what}, {earlier.text} of {before}: a {kind} of {measure.value:+.3f}{measure.spread}, "
        f"{allowed:g} allowed"
    )
    return measure.judged(name, allowed, said)


def _samples(result: SuiteResult) -> tuple[object, ...]:
    """Return what two results must have in common to be compared."""
    of = result.settings
    return (of.task, of.task_sha256, of.length, of.limit, of.tokenizer_sha256, of.backend,
            of.precision, of.harness, result.few_shot, result.samples)  # fmt: skip
