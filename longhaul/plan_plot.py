# SPDX-License-Identifier: Apache-2.0
"""The picture of `longhaul plan --plot`: memory and time by cause, against length."""

import os
from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eval.report_plots import PALETTE
from recipes.naming import length_shown
from recipes.planner.plan import Plan
from recipes.planner.search import Question, search
from recipes.units import GiB, K

SHORTEST, DOUBLINGS = 16 * K, 10


def draw(path: Path, question: Question) -> None:
    """Write a PNG of the fastest plan at each length from 16K to twice the one asked for."""
    plans = _by_length(question)
    if not plans:
        raise ValueError(
            f"nothing fits {question.gpus} GPUs of {question.cluster.name}: no picture"
        )
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(1, 2)
    words = [length_shown(length) for length in plans]
    _stacked(memory, words, [_part(plan.memory.causes, GiB) for plan in plans.values()])
    memory.axhline(question.cluster.gpu.memory_gib, color=PALETTE["muted"], linewidth=1)
    memory.set_ylabel("GiB of a GPU")
    shares = [_part(plan.time.causes, plan.time.step / 100) for plan in plans.values()]
    _stacked(time, words, shares)
    time.set_ylabel("% of a step")
    for at, plan in enumerate(plans.values()):
        time.annotate(
            f"{plan.time.tokens_per_gpu_second:,.0f}", (at, 101), ha="center", fontsize=7,
            color=PALETTE["muted"],
        )  # fmt: skip
    for axes in (memory, time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.suptitle(
        f"{question.card.name} on {question.gpus} GPUs of {question.cluster.name}; numbers are "
        "tokens/s/GPU"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.rename(path)


def _by_length(question: Question) -> dict[int, Plan]:
    found = {}
    length = SHORTEST
    for _ in range(DOUBLINGS):
        if length > 2 * max(question.seq_length, SHORTEST):
            break
        batch = max(question.tokens_per_batch // length, 1) * length
        answer = search(replace(question, seq_length=length, tokens_per_batch=batch))
        if answer.plans:
            found[length] = answer.plans[0]
        length *= 2
    return found


def _part(causes: dict[str, float], unit: float) -> dict[str, float]:
    return {name: size / unit for name, size in causes.items() if size > 0}


def _stacked(axes: "Axes", words: list[str], columns: list[dict[str, float]]) -> None:  # type: ignore[name-defined]  # noqa: F821
    names = list(dict.fromkeys(name for column in columns for name in column))
    below = [0.0] * len(words)
    for at, name in enumerate(names):
        heights = [column.get(name, 0.0) for column in columns]
        axes.bar(words, heights, bottom=below, label=name, color=f"C{at}", width=0.7)
        below = [base + height for base, height in zip(below, heights, strict=True)]
