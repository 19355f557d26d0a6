# SPDX-License-Identifier: Apache-2.0
"""The plot of `longhaul plan --plot`: memory and time by category, against length."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from data.files.whole import replacing
from eval.report.palette import PALETTE
from recipes.planner.plan import Plan
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest
from recipes.spec.naming import counted, length_shown
from recipes.spec.units import GiB, K

SHORTEST = 16 * K


def draw(path: Path, question: SearchRequest, *, tightest: bool = False) -> None:
    """Write a PNG of the plan at each length from 16K to twice the one asked for.

    Raises ValueError if none of them fits.
    """
    figure = picture(question, tightest=tightest)
    with replacing(path) as hidden:
        figure.savefig(hidden, format="png", dpi=150)


def picture(question: SearchRequest, *, tightest: bool = False) -> Figure:
    """Return the figure; a length at which nothing fits has a note instead of a bar."""
    lengths = _lengths(question.seq_length)
    plans = {length: _chosen(question, length, tightest=tightest) for length in lengths}
    there = {length: plan for length, plan in plans.items() if plan is not None}
    if not there:
        raise ValueError(
            f"nothing fits {counted(question.gpus, 'GPU')} of {question.cluster.name}: no plot"
        )
    figure = Figure(figsize=(11.6, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(1, 2)
    words = [length_shown(length) for length in plans]
    held = [_part(plan.memory.categories, GiB) if plan else {} for plan in plans.values()]
    _stacked(memory, words, held)
    whole = question.cluster.gpu.memory_gib
    memory.axhline(whole, color=PALETTE["muted"], linewidth=1)
    memory.set_ylim(0, 1.08 * whole)
    memory.set_ylabel(f"GiB of a GPU ({whole:g})")
    shares = [
        _part(plan.time.categories, plan.time.step / 100) if plan else {} for plan in plans.values()
    ]
    _stacked(time, words, shares)
    time.set_ylim(0, 108)
    time.set_ylabel("% of a step; above: tokens/s/GPU")
    for at, plan in enumerate(plans.values()):
        said = f"{plan.time.tokens_per_gpu_second:,.0f}" if plan else "does not fit"
        time.annotate(
            said, (at, 101 if plan else 1), ha="center", va="bottom", fontsize=7,
            rotation=0 if plan else 90, color=PALETTE["muted"],
        )  # fmt: skip
    for axes in (memory, time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("tokens of a sequence")
        axes.legend(
            frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), reverse=True
        )
    figure.suptitle(
        f"{question.card.name} on {counted(question.gpus, 'GPU')} of {question.cluster.name}, the "
        f"{'fastest' if tightest else 'planned'} layout at each length"
    )
    return figure


def _lengths(asked: int) -> list[int]:
    """Return powers of two from 16K to twice the length asked for, and that length."""
    found, length = {asked}, SHORTEST
    while length <= 2 * asked:
        found.add(length)
        length *= 2
    return sorted(found)


def _chosen(question: SearchRequest, length: int, *, tightest: bool) -> Plan | None:
    plans = search(question.at_length(length), tightest=tightest).plans
    return plans[0] if plans else None


def _part(categories: dict[str, float], unit: float) -> dict[str, float]:
    return {name: size / unit for name, size in categories.items() if size > 0}


def _stacked(axes: "Axes", words: list[str], columns: list[dict[str, float]]) -> None:  # type: ignore[name-defined]  # noqa: F821
    names = list(dict.fromkeys(name for column in columns for name in column))
    below = [0.0] * len(words)
    for at, name in enumerate(names):
        heights = [column.get(name, 0.0) for column in columns]
        axes.bar(words, heights, bottom=below, label=name, color=colormaps["tab20"](at), width=0.7)
        below = [base + height for base, height in zip(below, heights, strict=True)]
