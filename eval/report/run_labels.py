# SPDX-License-Identifier: Apache-2.0
"""Short names of several run folders, and their results with these names before the stages'."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.report.evaluations import comparable
from eval.report.ruler_tables import outdated_scores, read_ruler
from eval.report.suite_scores import read_suites
from eval.ruler.results import RulerResult
from eval.run_folder import Evaluation, RunRecord, StageResults, base_results, load
from eval.suite_results import SuiteResult


class RunsError(ValueError):
    """Raised for run folders that cannot be put side by side."""


@dataclass(frozen=True)
class LabelledRun:
    """A run whose stages, evaluations and models are named `LABEL: NAME`."""

    label: str
    path: Path
    record: RunRecord
    trained: list[StageResults]
    compared: list[StageResults]
    """Its base models and stages, each with its most comparable evaluation."""
    others: list[Evaluation]
    outdated: list[str]
    suites: list[SuiteResult]
    ruler: list[RulerResult]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations that are compared."""
        return [each.evaluation for each in self.compared if each.evaluation is not None]

    @property
    def last(self) -> Evaluation | None:
        """The evaluation of the last stage that has one; None if no stage has."""
        return next((each for each in reversed(self.evaluations) if each.base is None), None)


def labels(runs: Sequence[Path]) -> list[str]:
    """Return a short, distinct name for each run: the last part in which their paths differ.

    Raises RunsError for a folder that is given twice.
    """
    whole = [run.resolve() for run in runs]
    for at, path in enumerate(whole):
        if path in whole[:at]:
            raise RunsError(f"the run {runs[at]} is given twice; give each run folder once")
    for depth in range(1, max(len(path.parts) for path in whole) + 1):
        single = [path.parts[-depth] if depth <= len(path.parts) else "" for path in whole]
        joined = ["/".join(path.parts[-depth:]) for path in whole]
        for found in (single, joined):
            if all(found) and len(set(found)) == len(found):
                return found
    return [str(path) for path in whole]


def labelled(run: Path, label: str) -> LabelledRun:
    """Read a run folder and put its label before all names."""
    record, stages = load(run)
    compared, others, outdated = comparable(run, [*base_results(run), *stages])
    outdated = [*outdated, *outdated_scores(run, read_ruler(run))]
    return LabelledRun(
        label,
        run,
        record,
        [_stage(each, label, record) for each in stages],
        [_stage(each, label, record) for each in compared],
        [_evaluation(each, label, record) for each in others],
        [f"{label}: {sentence}" for sentence in outdated],
        read_suites(run, label),
        read_ruler(run, label),
    )


def common_folder(runs: Sequence[Path]) -> Path:
    """Return the deepest folder that holds all runs; raise RunsError if it is one of them."""
    whole = [run.resolve() for run in runs]
    folder = Path(os.path.commonpath(whole))
    if folder in whole:
        raise RunsError(f"{folder} holds the other runs and is one itself; name a file with --out")
    return folder


def _stage(stage: StageResults, label: str, record: RunRecord) -> StageResults:
    found = stage.evaluation
    return replace(
        stage,
        name=f"{label}: {stage.name}",
        evaluation=None if found is None else _evaluation(found, label, record),
    )


def _evaluation(evaluation: Evaluation, label: str, record: RunRecord) -> Evaluation:
    base = evaluation.base
    if base is not None:  # one that names no stages belongs to all of its run
        names = tuple(f"{label}: {name}" for name in base.stages or record.stages)
        base = replace(base, stages=names)
    return replace(evaluation, stage=f"{label}: {evaluation.stage}", base=base)
