# SPDX-License-Identifier: Apache-2.0
"""Run the suites of a ladder on one of its models, and judge a stage by their scores.

`longhaul run` launches it on every rank of a job, here or on Slurm: for the model before the first
stage, and after each stage. Results that are there with the same settings are not made again.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from data.store import Manifest
from eval.distributed import parallel_ranks
from eval.evaluate import Subject, subjects
from eval.gates.scores import judgements_of, pass_scores
from eval.harness.run import Evaluated, Suite, evaluate_models, of_checkpoint, tasks_left
from eval.harness.tasks import SuiteTask, find
from eval.run_folder import BASE
from eval.suite_results import Group, SuiteResult, read_result
from recipes.spec.gate import SuiteThreshold
from recipes.spec.suites import SuiteRun

Found = tuple[list[SuiteTask], list[Group]]
"""The tasks of a suite, and the groups among them."""


def run_suites(
    run: str,
    model: str,
    first: str,
    store: str,
    suites: Sequence[SuiteRun],
    before: str | None = None,
    thresholds: Sequence[SuiteThreshold] = (),
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
) -> None:
    """Write the results of a model: a stage, or `base`, what the stage `first` starts from.

    Prompts have those lengths of a suite that the model was trained for. A stage is then judged by
    `thresholds`, against the results of the model `before`; raises GateShutError if one is not met.
    """
    folder = Path(run)
    with parallel_ranks(tensor_parallel, context_parallel, device):
        tokenizer = Manifest.load(store).tokenizer_path
        subject = _subject(folder, model, first)
        evaluated = of_checkpoint(subject, tokenizer, device, verify)
        asked = [suite_of(each, subject.context) for each in suites]
        for suite in asked:
            evaluate_models(folder, [evaluated], suite)
    if thresholds and os.environ.get("RANK", "0") == "0":
        results, _ = _results(folder, evaluated, asked, found := found_tasks(suites))
        groups = [group for _, of_suite in found for group in of_suite]
        pass_scores(folder, model, before or BASE, thresholds, results, groups)


def have_passed(
    run: str,
    model: str,
    first: str,
    store: str,
    suites: Sequence[SuiteRun],
    found: Sequence[Found],
    before: str | None = None,
    thresholds: Sequence[SuiteThreshold] = (),
    device: str = "cpu",
) -> bool:
    """Whether `run_suites` would run no task, and a gate with these thresholds is open.

    `found` are the tasks of the suites, in their order.
    """
    folder = Path(run)
    evaluated = of_checkpoint(
        _subject(folder, model, first), Manifest.load(store).tokenizer_path, device, verify=False
    )
    asked = [suite_of(each, evaluated.context) for each in suites]
    results, lacking = _results(folder, evaluated, asked, found)
    groups = [group for _, of_suite in found for group in of_suite]
    judgements = judgements_of(folder, model, before or BASE, thresholds, results, groups)
    return not lacking and all(each.passed for each in judgements)


def found_tasks(suites: Sequence[SuiteRun]) -> list[Found]:
    """Return the tasks and groups of each suite; raise ValueError for unknown ones."""
    return [find(each.tasks, Path(each.include) if each.include else None)[:2] for each in suites]


def suite_of(stated: SuiteRun, context: int) -> Suite:
    """Return a suite of a ladder for a model that was trained for a context."""
    return Suite(
        names=tuple(stated.tasks),
        lengths=tuple(length for length in stated.lengths if length <= context),
        limit=stated.limit,
        include=Path(stated.include) if stated.include else None,
    )


def _subject(run: Path, model: str, first: str) -> Subject:
    base = model == BASE
    return next(iter(subjects(run, [first if base else model], base=base)))


def _results(
    run: Path, model: Evaluated, asked: Sequence[Suite], found: Sequence[Found]
) -> tuple[list[SuiteResult], int]:
    """Return the results of a model with exactly the settings asked for, and how many lack."""
    results, lacking = [], 0
    for suite, (tasks, _) in zip(asked, found, strict=True):
        for _, settings in tasks_left(tasks, model, suite):
            if (result := read_result(run, model.name, settings)) is not None:
                results.append(result)
            else:
                lacking += 1
    return results, lacking
