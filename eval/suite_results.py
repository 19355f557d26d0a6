# SPDX-License-Identifier: Apache-2.0
"""Results of lm-evaluation-harness in a run folder: one JSON file per model, task and length.

    RUN/eval/suites/<model>/<task>.json
    RUN/eval/suites/<model>/<task>_at_8192.json            a task that makes prompts of a length
    RUN/eval/suites/<model>/<task>_at_8192_limit_10.json   its first 10 samples
    RUN/eval/suites/<model>/<task>_chat.json               in the tokenizer's chat template

A model is a stage, the base model or an export. A file with the same settings is not made again, so
an interrupted evaluation resumes with the task that it was at. Neither torch nor the harness is
needed to read results.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.run_folder import BrokenResultError, write_json
from recipes.spec.schema import Number, decode


@dataclass(frozen=True)
class SuiteSettings:
    """What a result depends on besides the machine; equal settings give equal scores.

    Args:
        task_sha256: Of the task's configuration, and of its data if they are local files.
        length: Tokens of the prompts that the task makes; None if it does not make them.
        limit: Samples to evaluate, at most; None for all.
        longest: Tokens that the model reads, at most.
        weights_sha256: Of the facts that identify the weights: a checkpoint's marker, or names,
            sizes and times of an export's files.
        backend: `megatron` for a checkpoint, `hf` for an export; earlier releases had `vllm` too.
    """

    task: str
    task_sha256: str
    length: int | None
    limit: int | None
    longest: int
    weights_sha256: str
    tokenizer_sha256: str
    backend: str
    precision: str
    harness: str
    """Version of lm-evaluation-harness."""
    few_shot: int | None = None
    """Examples before each question; None for what the task states."""
    chat_template: str = ""
    """SHA-256 of the chat template that writes the prompts; empty if none does."""
    other_end_tokens: tuple[int, ...] = ()
    """Tokens that end a generation, besides the tokenizer's end of sequence."""


@dataclass(frozen=True)
class Metric:
    """One score of a task, with the standard error that the harness gives; NaN for none."""

    name: str
    filter: str
    value: Number
    standard_error: Number = math.nan
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class SuiteResult:
    """Content of a result file.

    Args:
        model: Stage, base model or folder of the export.
        weights: Path of the checkpoint or export.
        step: Of the checkpoint; None for an export.
        version: Of the task, as its author states it.
        samples: Evaluated samples.
        available: Samples that the task has, or made: no more than `limit` if it makes its prompts.
        most_tokens: Tokens of the longest request, generation included.
    """

    model: str
    weights: str
    step: int | None
    settings: SuiteSettings
    version: str
    few_shot: int
    samples: int
    available: int
    most_tokens: int
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class GroupMetric:
    """A score that a group of tasks defines over its tasks, for one model and length."""

    model: str
    group: str
    length: int | None
    name: str
    filter: str
    value: Number
    standard_error: Number
    samples: int
    missing: tuple[str, ...] = ()
    """Tasks of the group that have no such score; the value is that of the others."""


@dataclass(frozen=True)
class Group:
    """Tasks of a group and the metrics that it averages."""

    name: str
    tasks: tuple[str, ...]
    metrics: tuple[str, ...]
    by_size: bool
    """Whether tasks count by their samples, or each the same."""


def result_path(
    run: Path,
    model: str,
    task: str,
    length: int | None,
    limit: int | None,
    few_shot: int | None = None,
    *,
    chat_template: bool = False,
) -> Path:
    """Return the path of a result; all but the model is in the name."""
    name = re.sub(r"[^\w.-]+", "_", task)
    if length is not None:
        name += f"_at_{length}"
    if limit is not None:
        name += f"_limit_{limit}"
    if few_shot is not None:
        name += f"_few_shot_{few_shot}"
    if chat_template:
        name += "_chat"
    return run / "eval" / "suites" / model / f"{name}.json"


def write_result(run: Path, result: SuiteResult) -> None:
    """Write a result; it replaces one with other settings of the same name."""
    path = _path(run, result.model, result.settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)


def read_result(run: Path, model: str, settings: SuiteSettings) -> SuiteResult | None:
    """Return the result with exactly these settings, or None if there is none."""
    found = result_at(_path(run, model, settings))
    return found if found is not None and found.settings == settings else None


def result_at(path: Path) -> SuiteResult | None:
    """Return the result in a file, or None if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise BrokenResultError(
            f"{path} is not JSON ({error}); remove it to evaluate the task again"
        ) from None
    try:
        return decode(SuiteResult, content, str(path), unknown="ignore")
    except ValueError as error:
        raise BrokenResultError(str(error)) from None


def _path(run: Path, model: str, settings: SuiteSettings) -> Path:
    return result_path(
        run,
        model,
        settings.task,
        settings.length,
        settings.limit,
        settings.few_shot,
        chat_template=bool(settings.chat_template),
    )


def group_metrics(groups: Iterable[Group], results: Sequence[SuiteResult]) -> list[GroupMetric]:
    """Return the scores of groups at every length of their tasks.

    The harness's group of RULER averages the metric `4096` alone. Here a metric that is a length
    stands for the length of the prompts, whichever it is.
    """
    found = []
    for group in groups:
        own = [result for result in results if result.settings.task in group.tasks]
        for model in dict.fromkeys(result.model for result in own):
            of_model = [result for result in own if result.model == model]
            for length in dict.fromkeys(result.settings.length for result in of_model):
                at = [result for result in of_model if result.settings.length == length]
                found += _means(group, model, length, at)
    return found


def _means(
    group: Group, model: str, length: int | None, results: Sequence[SuiteResult]
) -> list[GroupMetric]:
    names = [str(length) if length and name.isdigit() else name for name in group.metrics]
    keys = dict.fromkeys(
        (metric.name, metric.filter)
        for result in results
        for metric in result.metrics
        if metric.name in names
    )
    found = []
    for name, of_filter in keys:
        rows = [
            (result, metric)
            for result in results
            for metric in result.metrics
            if (metric.name, metric.filter) == (name, of_filter)
        ]
        weights = [result.samples if group.by_size else 1 for result, _ in rows]
        there = {result.settings.task for result, _ in rows}
        found.append(
            GroupMetric(
                model=model,
                group=group.name,
                length=length,
                name=name,
                filter=of_filter,
                value=_weighted([metric.value for _, metric in rows], weights),
                standard_error=_error(
                    [metric.standard_error for _, metric in rows],
                    [result.samples for result, _ in rows],
                    by_size=group.by_size,
                ),
                samples=sum(result.samples for result, _ in rows),
                missing=tuple(task for task in group.tasks if task not in there),
            )
        )
    return found


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    pairs = zip(values, weights, strict=True)
    return sum(value * weight for value, weight in pairs) / sum(weights)


def _error(errors: Sequence[float], sizes: Sequence[int], *, by_size: bool) -> float:
    """Return the standard error of a group's mean as the harness has it; NaN if one is unknown."""
    pairs = list(zip(errors, sizes, strict=True))
    if not by_size:
        return math.sqrt(sum(error**2 for error in errors)) / len(errors)
    total, degrees = sum(sizes), sum(sizes) - len(sizes)
    if degrees == 0:
        return math.nan
    pooled = sum((size - 1) * size * error**2 for error, size in pairs) / degrees
    return math.sqrt(pooled / total)
