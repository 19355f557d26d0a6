# SPDX-License-Identifier: Apache-2.0
"""Results of lm-evaluation-harness as a table of the terminal, groups of tasks last."""

import math
from collections.abc import Sequence

from rich.table import Table

from eval.suite_results import GroupMetric, SuiteResult
from longhaul.terminal.console import show
from longhaul.terminal.messages import note
from recipes.spec.naming import length_shown

FILTER = "filter"


def show_suites(results: Sequence[SuiteResult], groups: Sequence[GroupMetric]) -> None:
    """Print a row for each score of each model, task and length, and for each group's."""
    rows = [
        (
            result.model,
            result.settings.task,
            result.settings.length,
            metric.name,
            metric.filter,
            metric.value,
            metric.standard_error,
            result.samples,
        )
        for result in results
        for metric in result.metrics
    ]
    rows += [
        (each.model, each.group, each.length, each.name, each.filter, each.value,
         each.standard_error, each.samples)
        for each in groups
    ]  # fmt: skip

    def table(without: Sequence[str]) -> Table:
        made = Table(title="Scores of lm-evaluation-harness")
        for title in ("model", "task"):
            made.add_column(title, no_wrap=True)
        made.add_column("length", justify="right", no_wrap=True)
        made.add_column("metric", no_wrap=True)
        if FILTER not in without:
            made.add_column(FILTER, no_wrap=True)
        for title in ("score", "std. error", "samples"):
            made.add_column(title, justify="right", no_wrap=True)
        for model, task, length, name, of_filter, value, error, samples in rows:
            cells = [model, task, length_shown(length) if length else "-", name]
            if FILTER not in without:
                cells.append(of_filter)
            made.add_row(*cells, _number(value), _number(error), f"{samples:,}")
        return made

    show(table, [FILTER])
    for group in groups:
        if group.missing:
            note(
                f"note: {group.group} of {group.model} lacks {', '.join(group.missing)}, which "
                f"have no score {group.name}"
            )


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "-"
