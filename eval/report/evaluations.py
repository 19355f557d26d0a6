# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a run beside each other: what they were made with, and which can be compared.

    RUN/eval/<stage>.json                    the latest evaluation of a stage
    RUN/eval/other/<stage>/<settings>.json   those before it that were made with other settings

Evaluations with the same settings replace each other; nothing else is overwritten. One of an
earlier checkpoint than the stage's newest is not chosen where there is one of the newest, and is
marked wherever it is shown.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from custom_modules.checkpoints.index import CheckpointError
from eval.run_folder import (
    BrokenResultError,
    Evaluation,
    StageResults,
    evaluation_at,
    evaluation_path,
    read_evaluation,
    stage_folder,
    stage_names,
    write_json,
)
from recipes.checkpoints.marker import steps_taken


@dataclass(frozen=True)
class Settings:
    """What an evaluation was made with."""

    eval_length: int
    documents: int
    trials: int
    """Passkey prompts of a cell; 0 for none."""
    store: str = ""
    """Empty where the file does not say it."""

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Settings":
        """Return the settings of an evaluation."""
        trials = 0 if evaluation.passkey is None else evaluation.passkey.trials
        return cls(evaluation.eval_length, evaluation.documents, trials, evaluation.store)

    def same_as(self, other: "Settings") -> bool:
        """Whether two evaluations can be compared; a store that is not said counts as the same."""
        if self.store and other.store and self.store != other.store:
            return False
        return replace(self, store="") == replace(other, store="")

    def described(self, *, with_store: bool) -> str:
        """Return the settings as they are read, the store among them if it is asked for."""
        documents = f"{self.documents:,} document{'s' * (self.documents != 1)}"
        trials = (
            f"{self.trials:,} trial{'s' * (self.trials != 1)}" if self.trials else "no passkeys"
        )
        of_store = f" of {self.store or 'a store that is not said'}" if with_store else ""
        return f"{documents}{of_store} to {self.eval_length:,} tokens, {trials}"

    @property
    def file_name(self) -> str:
        """The name of a file that no other settings have."""
        store = f"_{sha256(self.store.encode()).hexdigest()[:8]}" if self.store else ""
        return (
            f"{self.eval_length}_tokens_{self.documents}_documents_{self.trials}_trials{store}.json"
        )


def write_evaluation(run: Path, evaluation: Evaluation) -> None:
    """Write the latest evaluation of a stage; one with other settings that was there is kept."""
    stage = evaluation.stage
    try:
        before = read_evaluation(run, stage)
    except BrokenResultError:
        before = None
    if before is not None and not Settings.of(before).same_as(Settings.of(evaluation)):
        write_json(_other_path(run, before), before)
    write_json(evaluation_path(run, stage), evaluation)
    _other_path(run, evaluation).unlink(missing_ok=True)


def other_evaluations(run: Path, stage: str) -> list[Evaluation]:
    """Read the evaluations of a stage that were made with other settings than the latest."""
    found = map(evaluation_at, sorted(_others(run, stage).glob("*.json")))
    return [each for each in found if each is not None]


def _others(run: Path, stage: str) -> Path:
    return run / "eval" / "other" / stage


def _other_path(run: Path, evaluation: Evaluation) -> Path:
    return _others(run, evaluation.stage) / Settings.of(evaluation).file_name


class Chosen(NamedTuple):
    """The stages, each with the evaluation that most others can be compared with, and the rest."""

    stages: list[StageResults]
    others: list[Evaluation]
    outdated: list[str]
    """A sentence for each of the stages whose evaluation is of an earlier checkpoint."""


def comparable(run: Path, stages: Sequence[StageResults]) -> Chosen:
    """Choose for each stage the evaluation with the settings that most stages have.

    Only those of its newest checkpoint are chosen from, where it has one. Of settings that equally
    many have those of the later stages' latest evaluations; a stage without an evaluation of the
    chosen settings has its latest.
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
    """Return the step of a stage's newest checkpoint; where it has none, of its evaluation."""
    try:
        taken = steps_taken(stage_folder(run, stage.name) / "checkpoints")
    except CheckpointError:  # named by `status`; what was evaluated is shown all the same
        taken = 0
    return taken or (None if stage.evaluation is None else stage.evaluation.step)


def alike(evaluations: Sequence[Evaluation]) -> bool:
    """Whether all were made with the same settings."""
    settings = [Settings.of(each) for each in evaluations]
    return all(each.same_as(settings[0]) for each in settings[1:])


def in_words(evaluation: Evaluation, among: Iterable[Evaluation] = ()) -> str:
    """Return the settings of an evaluation, with its store where that of others is another."""
    stores = {each.store for each in (evaluation, *among)}
    return Settings.of(evaluation).described(with_store=len(stores - {""}) > 1)


class RangeRow(NamedTuple):
    """Pair a stage with its mean loss in each of the `range_bounds`; NaN where not measured."""

    stage: str
    means: list[float]


def range_bounds(evaluations: Iterable[Evaluation]) -> list[tuple[int, int]]:
    """List the ranges of positions that any of the evaluations measured, in rising order."""
    return sorted({(mean.start, mean.stop) for each in evaluations for mean in each.ranges})


def range_rows(evaluations: Sequence[Evaluation]) -> list[RangeRow]:
    """Tabulate the mean loss of each evaluation in each range of `range_bounds`."""
    bounds = range_bounds(evaluations)
    rows = []
    for each in evaluations:
        means = {(mean.start, mean.stop): mean.loss for mean in each.ranges}
        rows.append(RangeRow(each.stage, [means.get(bound, math.nan) for bound in bounds]))
    return rows


def range_table(run: Path) -> list[RangeRow]:
    """Tabulate the mean loss by range of the evaluated stages, in the order of the ladder."""
    return range_rows(read_evaluations(run))


def read_evaluations(run: Path) -> list[Evaluation]:
    """Read the latest evaluations a run has, in the order of the ladder."""
    found = (read_evaluation(run, name) for name in stage_names(run))
    return [each for each in found if each is not None]
