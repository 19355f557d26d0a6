# SPDX-License-Identifier: Apache-2.0
"""Scores of lm-evaluation-harness in a run folder as one table, with a column for each model.

Only results that depend on the same task, samples and harness share a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from eval.report.cells import MISSING, PLUS_MINUS, Cell, Row, number
from eval.suite_results import Metric, SuiteResult, result_at
from recipes.spec.naming import length_shown

FORM = "{:.4f}"


class SuiteTable(NamedTuple):
    """Heads of the columns after the first, and the rows."""

    heads: list[str]
    rows: list[Row]


def read_suites(run: Path, label: str = "") -> list[SuiteResult]:
    """Read all results of a run, by model and task; models are named `label: MODEL` if given."""
    files = sorted((run / "eval" / "suites").rglob("*.json"))
    found = [each for each in map(result_at, files) if each is not None]
    return [replace(each, model=f"{label}: {each.model}") for each in found] if label else found


def suite_table(results: Sequence[SuiteResult], names: Sequence[str] = ()) -> SuiteTable:
    """Return the scores: a column for each model, in the order of `names`, and the samples."""
    order = {name: number for number, name in enumerate(names)}
    in_order = sorted(results, key=lambda each: order.get(each.model, len(order)))
    models = list(dict.fromkeys(_model(result) for result in in_order))
    cells: dict[tuple[object, ...], dict[str, tuple[SuiteResult, Metric]]] = {}
    for result in results:
        for metric in result.metrics:
            key = (*_same(result), metric.name, metric.filter)
            cells.setdefault(key, {})[_model(result)] = (result, metric)
    rows = []
    for of_models in cells.values():
        result, metric = next(iter(of_models.values()))
        texts = [_text(*of_models[name]) if name in of_models else MISSING for name in models]
        samples = sorted({each.samples for each, _ in of_models.values()})
        texts.append(", ".join(f"{each:,}" for each in samples))
        rows.append(Row(_name(result, metric), [Cell(text) for text in texts]))
    return SuiteTable([*models, "samples"], _told_apart(rows, list(cells)))


def _model(result: SuiteResult) -> str:
    by = ", vLLM" if result.settings.backend == "vllm" else ""
    return f"{result.model}{by}" + ("" if result.step is None else f", step {result.step:,}")


def _same(result: SuiteResult) -> tuple[object, ...]:
    """Return what two results must share for their scores to be compared."""
    of = result.settings
    prompts_of = "" if of.length is None else of.tokenizer_sha256  # whose tokens fill the length
    of_task = (of.task, of.length, of.limit, result.few_shot, of.task_sha256, of.harness)
    return (*of_task, prompts_of, bool(of.chat_template))


def _name(result: SuiteResult, metric: Metric) -> str:
    of = result.settings
    at = f" at {length_shown(of.length)}" if of.length else ""
    few = f", {result.few_shot}-shot" if result.few_shot else ""
    chat = ", chat template" if of.chat_template else ""
    first = f", first {of.limit:,}" if of.limit else ""
    by = f" ({metric.filter})" if metric.filter not in ("", "none") else ""
    return f"{of.task}{at}{few}{chat}{first}: {metric.name}{by}"


def _text(_: SuiteResult, metric: Metric) -> str:
    error = number(metric.standard_error, f" {PLUS_MINUS} {FORM}", "")
    return number(metric.value, FORM) + error


def _tokens(tokenizer: object) -> str:
    return f", tokenizer {str(tokenizer)[:8]}" if tokenizer else ""


def _told_apart(rows: Sequence[Row], keys: Sequence[tuple[object, ...]]) -> list[Row]:
    """Add the version of the harness and the task's hash to rows that would have one name."""
    names = [row.name for row in rows]
    return [
        row
        if names.count(row.name) == 1
        else replace(
            row, name=f"{row.name}, harness {key[5]}, task {str(key[4])[:8]}{_tokens(key[6])}"
        )
        for row, key in zip(rows, keys, strict=True)
    ]
