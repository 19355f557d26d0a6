# SPDX-License-Identifier: Apache-2.0
"""RULER's scores of several models: means by length, scores by task, and the effective length.

Models share a table if at each length that both have they were asked the same samples, and if their
samples are of one suite and tokenizer. Others have a table of their own, and a sentence says why.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from custom_modules.checkpoints.index import CheckpointError
from eval.provenance import Provenance
from eval.report.cells import MISSING, PLUS_MINUS, Cell, Row
from eval.report.curve_names import clipped, name_curve, spread
from eval.report.palette import PALETTE, color, line
from eval.report.plots import (
    framed,
    inline_pair,
    length_label,
    narrow_figure,
    new_figure,
    sample_width,
)
from eval.ruler.results import RulerResult, lengths_of, read_results, together, why_apart
from eval.ruler.scoring import Average, Score, effective_sentence, effective_text
from recipes.checkpoints.marker import steps_taken
from recipes.spec.naming import length_shown, stage_folder

HEADS = ("date", "step", "answers of", "precision", "commit", "command")
"""Columns of `Table.measured`, after the model."""


@dataclass(frozen=True)
class Table:
    """The scores of models that were asked the same samples."""

    title: str
    results: tuple[RulerResult, ...]
    lengths: tuple[int, ...]
    figure: str | None

    @property
    def heads(self) -> list[str]:
        """Return the heads of the columns of `means`, after the model."""
        return [*map(length_shown, self.lengths), "effective length"]

    @property
    def means(self) -> list[Row]:
        """Return a row for each model: its mean over the tasks at each length."""
        rows = []
        for each in self.results:
            at = {average.length: average for average in each.scores.averages}
            cells = [Cell(_mean(at.get(length))) for length in self.lengths]
            effective = Cell(effective_text(each.scores) or MISSING)
            rows.append(Row(each.model, [*cells, effective]))
        return rows

    @property
    def tasks(self) -> list[tuple[Row, str]]:
        """Return a row for each task and model, the score at each length, and the model."""
        rows = []
        for task in dict.fromkeys(row.task for each in self.results for row in each.scores.scores):
            for each in self.results:
                at = {row.length: row for row in each.scores.scores if row.task == task}
                if at:
                    cells = [Cell(_score(at.get(length))) for length in self.lengths]
                    rows.append((Row(task, cells), each.model))
        return rows

    @property
    def samples(self) -> str:
        """Return how many samples of a task and length were scored."""
        counts = sorted({row.samples for each in self.results for row in each.scores.scores})
        return f"{counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else "")

    @property
    def sentences(self) -> list[str]:
        """Return what each model's effective length is, or why none is stated."""
        return [f"{each.model}: {effective_sentence(each.scores)}." for each in self.results]

    @property
    def measured(self) -> list[Row]:
        """Return a row of `HEADS` for each model."""
        return [Row(each.model, [Cell(text) for text in _facts(each)]) for each in self.results]


@dataclass(frozen=True)
class RulerPart:
    """The part of a page about RULER."""

    tables: tuple[Table, ...]
    apart: tuple[str, ...]
    """Why tables are apart; a sentence for each two that follow each other."""
    heads: tuple[str, ...] = HEADS


def read_ruler(run: Path, label: str = "") -> list[RulerResult]:
    """Read the scores of a run; models are named `label: MODEL` if it is given."""
    found = read_results(run)
    return [replace(each, model=f"{label}: {each.model}") for each in found] if label else found


def outdated_scores(run: Path, results: Sequence[RulerResult]) -> Iterator[str]:
    """Yield a sentence for each stage whose answers are of an earlier checkpoint."""
    for each in results:
        try:
            newest = steps_taken(stage_folder(run, each.model) / "checkpoints")
        except CheckpointError:  # reported by `status`
            continue
        if each.step is not None and newest > each.step:
            yield (
                f"{each.scores.suite} was answered by {each.model} at step {each.step:,} and its "
                f"newest checkpoint is of step {newest:,}: answer and score it again"
            )


def ruler_part(results: Sequence[RulerResult], names: Sequence[str]) -> RulerPart:
    """Return the tables of some models, in the order and with the colors of `names`."""
    order = {name: number for number, name in enumerate(names)}
    groups = together(sorted(results, key=lambda each: order.get(each.model, len(order))))
    tables = tuple(
        Table(
            f"{group[0].scores.suite}{f', table {number}' if len(groups) > 1 else ''}",
            tuple(group),
            lengths_of(group),
            _inline(group, names),
        )
        for number, group in enumerate(groups, 1)
    )
    return RulerPart(tables, tuple(_apart(*two) for two in pairwise(groups)))


def ruler_figures(part: RulerPart, names: Sequence[str]) -> dict[str, Figure | None]:
    """Return the figure of each table by the name of its file, `ruler` or `ruler_2`."""
    return {
        f"ruler{f'_{number}' if number > 1 else ''}": ruler_figure(table.results, names)
        for number, table in enumerate(part.tables, 1)
    }


def ruler_figure(
    results: Sequence[RulerResult], names: Sequence[str], *, narrow: bool = False
) -> Figure | None:
    """Draw the mean over the tasks by length, with its standard error; None for a single length."""
    lengths = lengths_of(results)
    if len(lengths) < 2:
        return None
    order = [*names, *(each.model for each in results if each.model not in names)]
    curves = [(order.index(each.model), each.model, each.scores.averages) for each in results]
    if narrow:
        figure, (axes,) = narrow_figure([(index, name) for index, name, _ in curves], [2.2])
    else:
        figure = new_figure(max(3.8, 1.0 + 0.2 * len(curves)))
        longest = max(len(clipped(name)) for _, name, _ in curves)
        beside = 0.0095 * longest + sample_width([index for index, _, _ in curves])
        axes = figure.add_axes((0.055, 0.14, 0.925 - beside, 0.76))
    for index, _, averages in curves:
        axes.errorbar(
            [each.length for each in averages],
            [each.score for each in averages],
            yerr=[each.standard_error or 0.0 for each in averages],
            color=color(index),
            linewidth=2.0,
            linestyle=line(index),
            elinewidth=1.0,
            capsize=3.0,
            marker="o",
            markersize=4.0,
        )
    if any(each.scores.effective_length is not None for each in results):
        axes.axhline(
            results[0].threshold, color=PALETTE["muted"], linewidth=1.0, linestyle=(0, (2, 3))
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(-2, 102)
    axes.xaxis.set_major_locator(
        FixedLocator(lengths[:: math.ceil(len(lengths) / (5 if narrow else 10))])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_label(value)))
    ends = spread([averages[-1].score for _, _, averages in curves], axes.get_ylim())
    for (index, name, averages), height in zip(() if narrow else curves, ends, strict=not narrow):
        name_curve(axes, name, (averages[-1].length, height), index, right=12)
    axes.set_xlabel("tokens of prompt and answer (log scale)")
    framed(axes, "mean score over the tasks, percent")
    return figure


def _inline(results: Sequence[RulerResult], names: Sequence[str]) -> str | None:
    return inline_pair(
        lambda narrow: ruler_figure(results, names, narrow=narrow),
        f"Mean score of {results[0].scores.suite} in percent by length",
    )


def _apart(before: Sequence[RulerResult], after: Sequence[RulerResult]) -> str:
    first, second = next((one, other) for one in before for other in after if why_apart(one, other))
    return f"{second.model} is not put next to {first.model}: {why_apart(first, second)}"


def _mean(average: Average | None) -> str:
    return MISSING if average is None else _with_error(average.score, average.standard_error)


def _score(score: Score | None) -> str:
    return MISSING if score is None else _with_error(score.score, score.standard_error)


def _with_error(score: float, error: float | None) -> str:
    return f"{score:.1f}" + ("" if error is None else f" {PLUS_MINUS} {error:.1f}")


def _facts(result: RulerResult) -> list[str]:
    about: Provenance = result.provenance
    return [
        about.date or MISSING,
        MISSING if result.step is None else f"{result.step:,}",
        result.weights or MISSING,
        result.precision or MISSING,
        about.short_commit or MISSING,
        about.command or MISSING,
    ]
