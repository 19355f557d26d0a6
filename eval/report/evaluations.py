# SPDX-License-Identifier: Apache-2.0
"""Settings of the evaluations of a run, and which of them can be compared.

    RUN/eval/<stage>.json                    the latest evaluation of a stage
    RUN/eval/other/<stage>/<settings>.json   earlier ones with other settings

An evaluation replaces an earlier one with the same settings; nothing else is overwritten. Parts
that it did not measure are kept if the earlier one is of the same weights and documents. If a stage
has an evaluation of its newest checkpoint, those of earlier checkpoints are not chosen; they are
marked wherever they are shown.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from custom_modules.checkpoints.index import CheckpointError
from eval.measurements import BaseRecord
from eval.provenance import Provenance
from eval.run_folder import (
    BrokenResultError,
    Evaluation,
    StageResults,
    evaluation_at,
    evaluation_path,
    read_evaluation,
    stage_names,
    write_json,
)
from recipes.checkpoints.marker import steps_taken
from recipes.spec.naming import stage_folder

log = logging.getLogger(__name__)

PARTS = {"context_gain": "gain from context", "short": "loss of short documents"}
"""Parts of an evaluation that its settings do not tell of, in words."""


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation."""

    eval_length: int
    documents: int
    trials: int
    """Passkey prompts per cell; 0 for none."""
    store: str = ""
    """Empty if the file does not state it."""
    prompt_lengths: tuple[int, ...] = ()
    """Lengths and depths of the passkey prompts; empty for none."""
    depths: tuple[float, ...] = ()
    prompt_version: int = 0
    """Version of the passkey prompts; 0 for none."""
    sources: tuple[str, ...] = ()
    """Source of each document, if the store has several."""
    first_tokens: int = 0
    """Tokens before the text of each window, such as a beginning of sequence."""

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Settings":
        """Return the settings of an evaluation."""
        grid = evaluation.passkey
        return cls(
            evaluation.eval_length,
            evaluation.documents,
            0 if grid is None else grid.trials,
            evaluation.store,
            () if grid is None else grid.lengths,
            () if grid is None else grid.depths,
            0 if grid is None else grid.prompt_version,
            evaluation.sources,
            evaluation.first_tokens,
        )

    def same_as(self, other: "Settings") -> bool:
        """Return whether two evaluations can be compared; a store not stated counts as the same."""
        if self.store and other.store and self.store != other.store:
            return False
        return replace(self, store="") == replace(other, store="")

    def described(self, *, with_store: bool, with_version: bool = False) -> str:
        """Return the settings as text, on request with the store and the version of prompts."""
        documents = f"{self.documents:,} document{'s' * (self.documents != 1)}"
        trials = (
            f"{self.trials:,} trial{'s' * (self.trials != 1)}" if self.trials else "no passkeys"
        )
        if self.sources:
            documents = f"{documents} (of {len(set(self.sources)):,} sources in turn)"
        of_store = f" of {self.store or 'a store that is not stated'}" if with_store else ""
        if self.trials and self.prompt_lengths[-1] != self.eval_length:
            lengths = ", ".join(f"{length:,}" for length in self.prompt_lengths)
            trials = f"{trials} of {lengths} tokens"
        if self.trials and with_version:
            trials = f"{trials}, prompts of version {self.prompt_version}"
        return f"{documents}{of_store} to {self.eval_length:,} tokens, {trials}"

    @property
    def file_name(self) -> str:
        """File name, unique to these settings."""
        store = f"_{sha256(self.store.encode()).hexdigest()[:8]}" if self.store else ""
        order = sha256("\n".join(self.sources).encode()).hexdigest()[:8]
        sources = f"_sources_{order}" if self.sources else ""
        later = f" {self.prompt_version}" if self.prompt_version > 1 else ""
        cells = sha256(f"{self.prompt_lengths} {self.depths}{later}".encode()).hexdigest()[:8]
        return (
            f"{self.eval_length}_tokens_{self.documents}_documents_{self.trials}_trials"
            f"{f'_{cells}' if self.trials else ''}{sources}{store}.json"
        )


def write_evaluation(run: Path, evaluation: Evaluation) -> None:
    """Write the latest evaluation of a stage; keep an existing one with other settings.

    What one with the same settings measured and this one did not is kept if both are of the same
    weights and documents (`Evaluation.identity`); else a warning says what is lost.
    """
    stage = evaluation.stage
    try:
        before = read_evaluation(run, stage)
    except BrokenResultError:
        before = None
    kept = [(path, evaluation_at(path)) for path in sorted(_others(run, stage).glob("*.json"))]
    replaced = [
        path
        for path, each in kept
        if each is not None and Settings.of(each) == Settings.of(evaluation)
    ]
    for each in (before, *(each for path, each in kept if path in replaced)):
        if each is not None and Settings.of(each).same_as(Settings.of(evaluation)):
            evaluation = _with_parts_of(each, evaluation)
    if before is not None and not Settings.of(before).same_as(Settings.of(evaluation)):
        write_json(_other_path(run, before), before)
    write_json(evaluation_path(run, stage), evaluation)
    for path in replaced:
        path.unlink()


def _with_parts_of(before: Evaluation, now: Evaluation) -> Evaluation:
    """Return an evaluation with the parts of an earlier one that it lacks, if they are of it."""
    for name, words in PARTS.items():
        if getattr(before, name) is None or getattr(now, name) is not None:
            continue
        date = before.kept.get(name) or (before.provenance or Provenance()).date
        if before.identity and before.identity == now.identity and before.step == now.step:
            now = replace(now, **{name: getattr(before, name)}, kept={**now.kept, name: date})
            continue
        log.warning(
            "%s: the %s of its earlier evaluation%s is not kept, since %s",
            now.stage,
            words,
            f" of {date}" if date else "",
            "that is of other weights or documents"
            if before.identity
            else "that does not state its weights",
        )
    return now


def evaluated_with(
    run: Path,
    stage: str,
    settings: Settings,
    step: int,
    ends: Sequence[int],
    base: BaseRecord | None = None,
    *,
    context_gain: bool = False,
    short: bool = False,
) -> bool:
    """Return whether the latest evaluation of a stage is of this step and was asked for the same.

    The same are the settings and the `ends` of the ranges of positions; of a `base` model also its
    weights and its rotation. With `context_gain`, or `short`, it must have that too.
    """
    try:
        latest = read_evaluation(run, stage)
    except BrokenResultError:
        return False
    return (
        latest is not None
        and Settings.of(latest) == settings
        and latest.step == step
        and [mean.stop for mean in latest.ranges] == list(ends)
        and (base is None or base.same_weights(latest.base))
        and (latest.context_gain is not None or not context_gain)
        and (latest.short is not None or not short)
    )


def base_record(run: Path, name: str) -> BaseRecord | None:
    """Return what the latest evaluation of a base model states of it; None without one."""
    try:
        latest = read_evaluation(run, name)
    except BrokenResultError:
        return None
    return None if latest is None else latest.base


def write_record(run: Path, name: str, base: BaseRecord) -> None:
    """Write what the latest evaluation of a base model states of it, if that has changed."""
    latest = read_evaluation(run, name)
    if latest is not None and latest.base != base:
        write_json(evaluation_path(run, name), replace(latest, base=base))


def other_evaluations(run: Path, stage: str) -> list[Evaluation]:
    """Read the evaluations of a stage with other settings than the latest."""
    found = map(evaluation_at, sorted(_others(run, stage).glob("*.json")))
    return [each for each in found if each is not None]


def _others(run: Path, stage: str) -> Path:
    return run / "eval" / "other" / stage


def _other_path(run: Path, evaluation: Evaluation) -> Path:
    return _others(run, evaluation.stage) / Settings.of(evaluation).file_name


class Chosen(NamedTuple):
    """The stages, each with its most comparable evaluation, and the other evaluations."""

    stages: list[StageResults]
    others: list[Evaluation]
    outdated: list[str]
    """One sentence for each stage whose evaluation is of an earlier checkpoint."""


def comparable(run: Path, stages: Sequence[StageResults]) -> Chosen:
    """Choose for each stage the evaluation with the settings that most stages have.

    Evaluations of the newest checkpoint are preferred. Ties between settings are decided by the
    latest evaluations of later stages. A stage without an evaluation with the chosen settings gets
    its latest.
    """
    newest = {stage.name: _newest_step(run, stage) for stage in stages}
    every_one = {
        stage.name: [
            each
            for each in (stage.evaluation, *other_evaluations(run, stage.name))
            if each is not None
        ]
        for stage in stages
    }
    there = {
        name: [each for each in found if each.step in (None, newest[name])] or found
        for name, found in every_one.items()
    }
    every = [Settings.of(each) for stage in reversed(stages) for each in there[stage.name]]
    if not every:
        return Chosen(list(stages), [], [])

    def of_stages(settings: Settings) -> int:
        return sum(
            any(Settings.of(each).same_as(settings) for each in of_stage)
            for of_stage in there.values()
        )

    wanted = max(every, key=of_stages)
    chosen, others, outdated = [], [], []
    for stage in stages:
        fitting = [each for each in there[stage.name] if Settings.of(each).same_as(wanted)]
        shown = next(iter([*fitting, *there[stage.name]]), None)
        chosen.append(replace(stage, evaluation=shown))
        others += [each for each in every_one[stage.name] if each is not shown]
        if shown is not None and shown.step not in (None, newest[stage.name]):
            outdated.append(
                f"{stage.name} was evaluated at step {shown.step:,} and its newest checkpoint is "
                f"of step {newest[stage.name]:,}: evaluate it again"
            )
    return Chosen(chosen, others, outdated)


def _newest_step(run: Path, stage: StageResults) -> int | None:
    """Return the step of a stage's newest checkpoint, or else of its evaluation."""
    try:
        taken = steps_taken(stage_folder(run, stage.name) / "checkpoints")
    except CheckpointError:  # reported by `status`; the evaluation is shown anyway
        taken = 0
    return taken or (None if stage.evaluation is None else stage.evaluation.step)


def same_settings(evaluations: Sequence[Evaluation]) -> bool:
    """Return whether all have the same settings."""
    settings = [Settings.of(each) for each in evaluations]
    return all(each.same_as(settings[0]) for each in settings[1:])


def in_words(evaluation: Evaluation, among: Iterable[Evaluation] = ()) -> str:
    """Return the settings of an evaluation as text.

    With its store, and the version of its prompts, if others have another.
    """
    every = [Settings.of(each) for each in (evaluation, *among)]
    return Settings.of(evaluation).described(
        with_store=len({each.store for each in every} - {""}) > 1,
        with_version=len({each.prompt_version for each in every} - {0}) > 1,
    )


class RangeRow(NamedTuple):
    """A stage and its mean loss in each of the `range_bounds`; NaN if not measured."""

    stage: str
    means: list[float]
    errors: list[float]
    """Standard errors of the means."""


def range_bounds(evaluations: Iterable[Evaluation]) -> list[tuple[int, int]]:
    """Return the ranges of positions that any of the evaluations measured, in rising order."""
    return sorted({(mean.start, mean.stop) for each in evaluations for mean in each.ranges})


def range_rows(evaluations: Sequence[Evaluation]) -> list[RangeRow]:
    """Return the mean loss of each evaluation in each range of `range_bounds`."""
    bounds = range_bounds(evaluations)
    rows = []
    for each in evaluations:
        means = {(mean.start, mean.stop): mean for mean in each.ranges}
        of_bounds = [means.get(bound) for bound in bounds]
        rows.append(
            RangeRow(
                each.stage,
                [math.nan if mean is None else mean.loss for mean in of_bounds],
                [math.nan if mean is None else mean.standard_error for mean in of_bounds],
            )
        )
    return rows


def read_evaluations(run: Path) -> list[Evaluation]:
    """Read the latest evaluations a run has, in the order of the ladder."""
    found = (read_evaluation(run, name) for name in stage_names(run))
    return [each for each in found if each is not None]
