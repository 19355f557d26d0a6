# SPDX-License-Identifier: Apache-2.0
"""The table, the JSON and the CSV file of `longhaul plan --sweep`."""

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from data.files.whole import write_text
from longhaul.terminal.console import print_left_out, show
from recipes.notation.layout import words_of
from recipes.planner.search.sweep import Point, frontier
from recipes.spec.naming import budget_word, length_shown
from recipes.spec.units import GiB

EXPENDABLE = ("layout", "GiB", "MFU", "batch", "tokens/s")


def page(points: Sequence[Point]) -> None:
    """Print a line per point, and which of them no other beats in cost and time."""
    first = points[0]
    best = frontier(points)
    price = first.question.cluster.price_per_gpu_hour
    paid = f"cost ({first.question.cluster.currency})" if price else ""
    lines = [_line(point, point in best, paid) for point in points]

    def table(without: Sequence[str]) -> Table:
        made = Table(title=_title(first))
        titles = [title for title in lines[0] if title not in without]
        for title in titles:
            made.add_column(
                title, no_wrap=True, justify="left" if title in ("layout", "") else "right"
            )
        for at, line in enumerate(lines):
            made.add_row(*(line[title] for title in titles))
            is_last = at + 1 == len(points)
            if not is_last and points[at + 1].question.seq_length != points[at].question.seq_length:
                made.add_section()
        return made

    left_out = show(table, EXPENDABLE)
    numbered = [{"of": f"{line['seq']} on {line['GPUs']}", **line} for line in lines]
    print_left_out(numbered, "of", left_out)
    typer.echo(_longest(points))
    if best:
        typer.echo(
            f"* of this length nothing is both sooner and takes fewer GPU-hours; both for "
            f"{budget_word(first.tokens)} tokens, with failures of nodes"
        )
    if any(point.plan is not None and point.plan.untried for point in points):
        typer.echo(
            "? only a layout fits with parts that were not tried on GPUs here, or failed there"
        )


def as_json(points: Sequence[Point]) -> dict[str, Any]:
    """Return the sweep as numbers: bytes, seconds, tokens."""
    first = points[0]
    return {
        "card": first.question.card.name,
        "cluster": first.question.cluster.name,
        "tokens": first.tokens,
        "currency": first.question.cluster.currency,
        "points": _records(points),
    }


def as_csv(path: Path, points: Sequence[Point]) -> None:
    """Write a CSV file atomically: a line per point, with empty cells if it does not fit."""
    text = io.StringIO()
    records = _records(points)
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(path, text.getvalue())


def _records(points: Sequence[Point]) -> list[dict[str, Any]]:
    best = frontier(points)
    return [_record(point, point in best) for point in points]


def _record(point: Point, is_best: bool) -> dict[str, Any]:
    question, plan = point.question, point.plan
    asked = {
        "seq_length": question.seq_length,
        "gpus": question.gpus,
        "tokens_per_batch": question.tokens_per_batch,
        "fits": plan is not None,
    }
    if plan is None:
        return asked
    return asked | {
        "layout": words_of(plan.workload.layout),
        "untried": bool(plan.untried),
        "memory_total_bytes": plan.memory.total,
        "host_bytes_per_rank": plan.memory.host,
        "step_seconds": plan.time.step,
        "tokens_per_second_per_gpu": plan.time.tokens_per_gpu_second,
        "tokens_per_second": plan.time.tokens_per_gpu_second * plan.gpus,
        "mfu": plan.time.mfu,
        "goodput_share": point.goodput.share,
        "gpu_hours": point.gpu_hours,
        "days": point.days,
        "cost": point.gpu_hours * plan.cluster.price_per_gpu_hour,
        "frontier": is_best,
    }


def _line(point: Point, is_best: bool, paid: str) -> dict[str, str]:
    question, plan = point.question, point.plan
    line = {
        "seq": length_shown(question.seq_length),
        "GPUs": f"{question.gpus:,}",
        "batch": length_shown(question.tokens_per_batch),
        "layout": "does not fit",
        "GiB": "",
        "tokens/s/GPU": "",
        "tokens/s": "",
        "MFU": "",
        "days": "",
        "GPU-hours": "",
    } | ({paid: ""} if paid else {})
    if plan is None:
        return line | {"": ""}
    rate = plan.time.tokens_per_gpu_second
    shown = {
        "layout": words_of(plan.workload.layout),
        "GiB": f"{plan.memory.total / GiB:.1f}",
        "tokens/s/GPU": f"{rate:,.0f}",
        "tokens/s": f"{rate * plan.gpus:,.0f}",
        "MFU": f"{plan.time.mfu:.0%}",
        "days": _digits(point.days, 2),
        "GPU-hours": _digits(point.gpu_hours),
    }
    if paid:
        shown[paid] = _digits(point.gpu_hours * plan.cluster.price_per_gpu_hour)
    return line | shown | {"": "*" * is_best + "?" * bool(plan.untried)}


def _digits(number: float, decimals: int = 0) -> str:
    """Return a number with so many decimals; a small one with two significant digits."""
    return f"{number:,.{decimals}f}" if number >= 10 ** (1 - decimals) else f"{number:.2g}"


def _title(point: Point) -> str:
    question = point.question
    return f"{question.card.name} on {question.cluster.name} ({question.cluster.gpu.name})"


def _longest(points: Sequence[Point]) -> str:
    """Return a sentence on the longest length of the sweep that fits each number of GPUs."""
    longest: dict[int, int] = {}
    for point in points:
        length = point.question.seq_length * (point.plan is not None)
        longest[point.question.gpus] = max(length, longest.get(point.question.gpus, 0))
    said = []
    for length, group in groupby(longest.items(), key=lambda one: one[1]):
        gpus = [count for count, _ in group]
        among = f"{gpus[0]:,}" if len(gpus) == 1 else f"{gpus[0]:,} to {gpus[-1]:,}"
        said.append(f"{length_shown(length) if length else 'none'} on {among}")
    return f"longest of these lengths that fits, by GPUs: {', '.join(said)}"
