# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan`: the layout of a stage on your GPUs, and what it takes, before one is touched."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from longhaul.nearest import named
from longhaul.options import CLUSTER
from longhaul.plan_page import as_json, bill, page
from recipes import cluster as clusters
from recipes.ladders import LADDERS
from recipes.layout import Fp8
from recipes.layout_words import layout_from
from recipes.model_card import ModelCard
from recipes.models import CARDS
from recipes.naming import length_from, length_shown
from recipes.planner.plan import Plan
from recipes.planner.search import (
    Answer,
    NoLayoutError,
    Question,
    max_length,
    of_stage,
    search,
    why_not,
)
from recipes.units import M

BATCH, BUDGET = 4 * M, 1_000_000_000
"""Tokens of a batch and of a stage where none are given: ProLong's, Nemotron-UltraLong's."""
FP8 = ("tensorwise", "blockwise", "delayed", "mxfp8")


def plan(
    card: Annotated[str, typer.Argument(help="A model card, as llama31_8b.")] = "",
    seq: Annotated[str, typer.Option(help="Context, as 64K or 1M.")] = "",
    ladder: Annotated[str, typer.Option(help="Plan every stage of a ladder, and the bill.")] = "",
    cluster: Annotated[str, typer.Option(help="Cluster file: a shipped name or a path.")] = CLUSTER,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    tokens_per_batch: Annotated[
        str, typer.Option(help="Tokens of an optimizer step.", show_default="4M, a stage's own")
    ] = "",
    tokens: Annotated[
        int, typer.Option(min=0, help="Budget of the stage.", show_default="1B, a stage's own")
    ] = 0,
    fp8: Annotated[str, typer.Option(help=f"Linear layers in FP8: {', '.join(FP8)}.")] = "",
    layout: Annotated[
        str, typer.Option(help="A layout of your own in words, as 'tp2 ulysses4 kept_attention'.")
    ] = "",
    max_seq: Annotated[bool, typer.Option("--max-seq", help="The longest that fits.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Show what was ruled out.")] = False,
    as_text: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG: memory and time by length.")] = None,
) -> None:
    """Choose the fastest layout that fits, and print its memory and its time by cause."""
    machine = clusters.load(cluster)
    if fp8 and fp8 not in FP8:
        raise ValueError(f"--fp8 is {fp8!r}; it is {', '.join(FP8)}")
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot {plot} is not a .png file")
    precision = Fp8(recipe=fp8 or "none")  # type: ignore[arg-type]
    if precision.recipe != "none" and not machine.gpu.fp8_tflops:
        raise ValueError(f"--fp8 {fp8}: {machine.gpu.name} of {machine.name} has no FP8")
    if ladder:
        whole_ladder(card, ladder, machine, nodes, precision, as_text=as_text)
        return
    if not card:
        raise ValueError("name a model card, as `longhaul plan llama31_8b --seq 1M`, or --ladder")
    model = named("model card", card, CARDS)
    if not seq and not max_seq:
        raise ValueError("--seq is missing, as --seq 1M; or ask for --max-seq")
    length = length_from(seq) if seq else M
    per_batch = length_from(tokens_per_batch) if tokens_per_batch else 0
    question = Question(
        card=model,
        seq_length=length,
        tokens_per_batch=per_batch or max(BATCH // length, 1) * length,
        cluster=machine,
        gpus=nodes * machine.gpus_per_node,
        fp8=precision,
    )
    if max_seq:
        length = max_length(question)
        if not length:
            raise NoLayoutError(why_not(question, search(question)))
        per_batch = max(question.tokens_per_batch // length, 1) * length
        question = replace(question, seq_length=length, tokens_per_batch=per_batch)
    answer = search(question) if not layout else _as_asked(question, layout)
    if not answer.plans:
        raise NoLayoutError(why_not(question, answer))
    budget = tokens or BUDGET
    if as_text:
        typer.echo(json.dumps(as_json(question, answer, budget), indent=1))
    else:
        page(question, answer, budget, default_budget=not tokens, why=why)
        if max_seq:
            typer.echo(f"the longest context that fits: {length_shown(length)} tokens")
    if plot is not None:
        from longhaul.plan_plot import draw

        draw(plot, question)
        typer.echo(plot)


def _as_asked(question: Question, words: str) -> Answer:
    """Return the plan of a layout of the user's, where it fits."""
    layout = layout_from(words)
    if layout.world_size != question.gpus:
        raise ValueError(
            f"--layout has {layout.world_size} ranks and {question.gpus} GPUs are asked for; set "
            "--nodes, or dp"
        )
    one = question.plan(layout)
    if one.fits:
        return Answer(plans=[one], tried=1)
    return Answer(plans=[], nearest=one, tried=1)


def whole_ladder(
    card: str, name: str, machine: clusters.Cluster, nodes: int, fp8: Fp8, *, as_text: bool
) -> None:
    """Plan each stage of a ladder on the same nodes and print the bill."""
    climbed = named("ladder", name, LADDERS)
    if not card and len(climbed.cards) > 1:
        raise ValueError(
            f"ladder {name} is for several cards; name one: longhaul plan {climbed.cards[0]} "
            f"--ladder {name}"
        )
    model: ModelCard = named("model card", card or climbed.cards[0], CARDS)
    plans: list[tuple[Plan, int]] = []
    for stage in climbed.stages:
        question = of_stage(model, stage, machine, gpus=nodes * machine.gpus_per_node, fp8=fp8)
        answer = search(question)
        if not answer.plans:
            raise NoLayoutError(why_not(question, answer))
        plans.append((answer.plans[0], stage.tokens))
    bill(model, climbed, machine, nodes, plans, as_text=as_text)
