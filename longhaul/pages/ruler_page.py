# SPDX-License-Identifier: Apache-2.0
"""What `longhaul ruler` prints: the files that it made, and scores by task and length."""

from collections.abc import Sequence

import typer
from rich import box
from rich.table import Table

from eval.ruler.results import RulerResult, lengths_of, together
from eval.ruler.samples import SampleFile
from eval.ruler.scoring import Scores, effective_sentence, effective_text
from longhaul.terminal.console import show
from recipes.spec.naming import length_shown

EXPENDABLE = ("unit", "seconds", "of the budget")
"""Columns that a narrow terminal leaves out, in this order."""


def show_files(suite: str, rows: Sequence[SampleFile], found: Sequence[bool]) -> None:
    """Print the files; `found` says which were there already."""
    cells = {
        "length": [length_shown(row.length) for row in rows],
        "samples": [f"{row.samples:,}" for row in rows],
        "tokens min": [f"{row.fewest_tokens:,}" for row in rows],
        "median": [f"{row.median_tokens:,.0f}" for row in rows],
        "max": [f"{row.most_tokens:,}" for row in rows],
        "of the budget": [f"{row.fewest_tokens / row.budget:.1%}" for row in rows],
        "unit": [row.unit for row in rows],
        "seconds": [
            "checked" if there else f"{row.seconds:,.1f}"
            for row, there in zip(rows, found, strict=True)
        ],
    }

    def table(without: Sequence[str]) -> Table:
        made = Table(title=f"Samples of {suite}", box=box.ASCII2)
        made.add_column("task", no_wrap=True)
        shown = {title: column for title, column in cells.items() if title not in without}
        for title in shown:
            made.add_column(title, justify="left" if title == "unit" else "right", no_wrap=True)
        for at, row in enumerate(rows):
            made.add_row(row.task, *(column[at] for column in shown.values()))
        return made

    show(table, EXPENDABLE)


def show_scores(scores: Scores) -> None:
    """Print scores by task and length, averages, and the effective length."""
    lengths = [one.length for one in scores.averages]
    by_place = {(row.task, row.length): row for row in scores.scores}

    def table(_: Sequence[str]) -> Table:
        made = Table(title=f"Scores of {scores.suite}, percent and standard error", box=box.ASCII2)
        made.add_column("task", no_wrap=True)
        for length in lengths:
            made.add_column(length_shown(length), justify="right", no_wrap=True)
        for task in dict.fromkeys(row.task for row in scores.scores):
            rows = (by_place.get((task, length)) for length in lengths)
            made.add_row(
                task, *("" if row is None else _cell(row.score, row.standard_error) for row in rows)
            )
        made.add_section()
        averages = (_cell(one.score, one.standard_error) for one in scores.averages)
        made.add_row("average", *averages)
        return made

    show(table)
    counts = sorted({row.samples for row in scores.scores})
    typer.echo(
        f"samples of a task and length: {counts[0]:,}"
        + (f" to {counts[-1]:,}" if len(counts) > 1 else "")
    )
    typer.echo(effective_sentence(scores))


def show_ruler(results: Sequence[RulerResult]) -> None:
    """Print the means of models by length; those that were asked other samples apart."""
    for group in together(results):

        def table(_: Sequence[str], group: Sequence[RulerResult] = group) -> Table:
            return _means(group)

        show(table)


def _means(group: Sequence[RulerResult]) -> Table:
    title = f"{group[0].scores.suite}, mean over tasks, percent and standard error"
    made = Table(title=title, box=box.ASCII2)
    made.add_column("model", no_wrap=True)
    lengths = lengths_of(group)
    for head in (*map(length_shown, lengths), "effective"):
        made.add_column(head, justify="right", no_wrap=True)
    for each in group:
        at = {one.length: _cell(one.score, one.standard_error) for one in each.scores.averages}
        means = (at.get(length, "-") for length in lengths)
        made.add_row(each.model, *means, effective_text(each.scores) or "-")
    return made


def _cell(score: float, error: float | None) -> str:
    return f"{score:.1f}" if error is None else f"{score:.1f} +- {error:.1f}"
