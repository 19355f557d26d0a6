# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan`: choose the layout of a stage on given GPUs, with its memory and time."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from longhaul.defaults import planned_cluster
from longhaul.doctor.case import Case, Recipe, after_comments, on_one_line
from longhaul.options import K_IS, Cluster, Json, length_of, print_json
from longhaul.pages.plan_page import as_json, bill, page
from longhaul.terminal.messages import note
from longhaul.terminal.next_commands import OnCluster, sized
from recipes.constraints import fp8 as fp8_constraints
from recipes.ladders import LADDERS
from recipes.notation.layout import layout_from, words_of
from recipes.planner.batch_size import even_batch
from recipes.planner.feasibility import CUDA, before_planning, violations
from recipes.planner.plan import Plan
from recipes.planner.plan import plan as plan_of
from recipes.planner.search.alternatives import (
    NoLayoutError,
    automatic,
    lacks,
    longest,
    max_length,
    why_not,
)
from recipes.planner.search.ranking import SearchResult, search
from recipes.planner.search.request import SearchRequest, of_stage
from recipes.shipped.machines import gpus_of
from recipes.shipped.named import card_named, cards_of, combined
from recipes.shipped.rotation import is_possible, of_other_cards, rotation_refusal
from recipes.shipped.select import shipped_row
from recipes.spec import cluster as clusters
from recipes.spec.cluster import CLUSTER
from recipes.spec.layout import Fp8, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import amount, budget_from, length_shown, length_word, recipe_name
from recipes.spec.stage import Ladder, Stage
from recipes.spec.units import K, M

BATCH, BUDGET = 4 * M, 1_000_000_000
"""Tokens of a batch and of a stage where none are given: ProLong's, Nemotron-UltraLong's."""
FP8 = ("tensorwise", "blockwise", "delayed", "mxfp8")


def plan(
    card: Annotated[str, typer.Argument(help="A model card, such as llama31_8b.")] = "",
    seq: Annotated[str, typer.Option(help=f"Context, such as 64K or 1M ({K_IS}).")] = "",
    ladder: Annotated[str, typer.Option(help="Plan every stage of a ladder, with its bill.")] = "",
    cluster: Cluster = "",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the cluster.", show_default="1")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs, if they are not whole nodes.")
    ] = None,
    tokens_per_batch: Annotated[
        str, typer.Option(help=f"Tokens of an optimizer step ({K_IS}).", show_default="about 4M")
    ] = "",
    tokens: Annotated[
        str, typer.Option(help="Budget of the stage, such as 5B (10^9).", show_default="1B")
    ] = "",
    fp8: Annotated[str, typer.Option(help=f"Linear layers in FP8: {', '.join(FP8)}.")] = "",
    layout: Annotated[
        str, typer.Option(help="Plan this layout, such as 'tp2 ulysses4 kept_attention'.")
    ] = "",
    max_seq: Annotated[bool, typer.Option("--max-seq", help="Find the longest that fits.")] = False,
    tightest: Annotated[
        bool, typer.Option("--tightest", help="Take the fastest, however full the GPUs are.")
    ] = False,
    why: Annotated[bool, typer.Option("--why", help="Show what was ruled out.")] = False,
    as_text: Json = False,
    plot: Annotated[Path | None, typer.Option(help="PNG: memory and time by length.")] = None,
) -> None:
    """Choose a layout that fits and is fast, and print its memory and its time by category."""
    cluster = planned_cluster(cluster) or CLUSTER
    machine = clusters.load(cluster)
    if fp8 and fp8 not in FP8:
        raise ValueError(f"--fp8 is {fp8!r}; expected one of {', '.join(FP8)}")
    if plot is not None:
        from data.files.writable import require_file

        require_file(plot, "--plot", (".png",))
    precision = Fp8(recipe=fp8 or "none")  # type: ignore[arg-type]
    if precision.recipe != "none" and not machine.gpu.fp8_tflops:
        raise ValueError(
            f"--fp8 {fp8}: {machine.gpu.name} of {machine.name} has no FP8; leave --fp8 out, or "
            "name another --cluster"
        )
    refused = fp8_constraints.refusal(precision.recipe, machine.gpu.capability, CUDA)
    if refused is not None:
        raise ValueError(f"--fp8 {fp8} on {machine.name}: {refused}")
    ranks = gpus_of(machine, nodes, gpus)
    if ladder:
        _refuse(
            "--ladder, whose stages set theirs",
            {
                "--seq": seq, "--tokens-per-batch": tokens_per_batch, "--tokens": tokens,
                "--layout": layout, "--max-seq": max_seq, "--tightest": tightest, "--why": why,
                "--plot": plot,
            },
        )  # fmt: skip
        whole_ladder(card, ladder, cluster, ranks, precision, as_text=as_text)
        return
    if not card:
        raise ValueError(
            "name a model card, as in `longhaul plan llama31_8b --seq 1M`, or --ladder"
        )
    model = card_named(card)
    if max_seq:
        _refuse("--max-seq, which finds it", {"--seq": seq})
    elif not seq:
        raise ValueError("--seq is missing; add it, such as --seq 1M, or --max-seq")
    if layout:
        _refuse("--layout, which sets fp8:RECIPE itself", {"--fp8": fp8})
        _refuse("--layout", {"--tightest": tightest})
        _refuse("--layout; a plot shows the planner's own", {"--plot": plot})
    length = length_of("--seq", seq) if seq else K
    if tokens_per_batch:
        per_batch = length_of("--tokens-per-batch", tokens_per_batch)
    else:
        per_batch = even_batch(BATCH, length, ranks)
    question = SearchRequest(
        card=model,
        seq_length=length,
        tokens_per_batch=per_batch,
        cluster=machine,
        gpus=ranks,
        fp8=precision,
    )
    if max_seq:
        question = _longest(question, layout)
    answer = _as_asked(question, layout) if layout else search(question, tightest=tightest)
    if not answer.plans:
        raise NoLayoutError(why_not(question, answer))
    budget = budget_from(tokens) if tokens else BUDGET
    trained = training_command(
        question, answer.plans[0].workload.layout, cluster,
        batch=question.tokens_per_batch if tokens_per_batch else None,
        budget=budget if tokens else None,
    )  # fmt: skip
    if as_text:
        content = as_json(question, answer, budget) | {"command": trained and on_one_line(trained)}
        print_json(content)
    else:
        page(question, answer, budget, default_budget=not tokens, why=why)
        if trained is not None:
            typer.echo(f"train it, as a stage of a ladder:\n  {trained}")
        elif question.seq_length < model.native_context:
            typer.echo(
                f"{model.name} was trained for {model.native_context:,} tokens; a ladder extends "
                "that, so no command trains it at fewer"
            )
        else:
            shown = length_shown(question.seq_length)
            typer.echo(f"no ladder has a stage of {shown} for {model.name}; write one, train it:")
            for line in own_ladder(question, answer.plans[0].workload.layout, cluster, budget):
                typer.echo(f"  {line}")
        if max_seq:
            shown = length_shown(question.seq_length)
            typer.echo(f"the longest context that fits: {shown} tokens")
    if plot is not None:
        from longhaul.pages.plan_plot import draw

        draw(plot, question)
        typer.echo(plot, err=as_text)


def training_command(
    question: SearchRequest,
    layout: Layout,
    cluster: str,
    *,
    batch: int | None = None,
    budget: int | None = None,
) -> str | None:
    """Return the command that trains a layout as a stage that a ladder has for the card.

    Batch and budget are then those of the stage; a comment says so if others were asked for. The
    card's own ladders come first, then those of other cards, last those whose rotations do not
    suit it, each with a comment. Returns None if no ladder has a stage that the layout can train.
    """
    card = question.card
    stages = [
        (card.name not in ladder.cards, rotation_refusal(card, stage) or "", ladder, stage)
        for ladder in LADDERS.values()
        for stage in ladder.stages
        if stage.seq_length == question.seq_length and is_possible(ladder, card, stage.seq_length)
    ]
    for of_others, unsuited, ladder, stage in sorted(stages, key=lambda s: (s[0], bool(s[1]))):
        command = stage_command(question, layout, cluster, ladder, stage)
        if command is not None:
            other = of_other_cards(ladder, card) if of_others else ""
            comment = ": ".join(filter(None, [other, of_others * unsuited]))
            return after_comments(command, comment, _of_the_stage(stage, batch, budget))
    return None


def own_ladder(question: SearchRequest, layout: Layout, cluster: str, budget: int) -> Iterator[str]:
    """Yield the commands that write a ladder of one stage for a question, and that train it."""
    from recipes.notation import ladder_file  # here: it imports pydantic

    card, length = question.card, length_word(question.seq_length).upper()
    path = Path(f"{card.name}_{length.lower()}.yaml")
    yield (
        f"longhaul ladders new {shlex.quote(str(path))} --card {card.word} --seq {length} "
        f"--tokens {budget} --tokens-per-batch {question.tokens_per_batch}"
    )
    text = ladder_file.of_one_stage(
        path, card, seq_length=question.seq_length, tokens=budget,
        tokens_per_batch=question.tokens_per_batch,
    )  # fmt: skip
    ladder = replace(ladder_file.from_text(text, path, card), path=str(path))
    recipe = Recipe(card=card, ladder=ladder, stage=ladder.stages[0], cluster=cluster)
    workload = recipe.workload(layout, question.cluster)
    yield from (
        Case(recipe=recipe, plan=plan_of(workload, question.cluster)).command(workload).splitlines()
    )


def _of_the_stage(stage: Stage, batch: int | None, budget: int | None) -> str:
    """Return a sentence that a stage trains its own tokens; empty if no others were asked for."""
    asked = {
        "--tokens-per-batch": batch not in (None, stage.tokens_per_batch),
        "--tokens": budget not in (None, stage.tokens),
    }
    ignored = " and ".join(option for option, other in asked.items() if other)
    if not ignored:
        return ""
    return (
        f"it trains the stage's own batch of {stage.tokens_per_batch:,} tokens and its budget of "
        f"{amount(stage.tokens)}, not those of {ignored}"
    )


def stage_command(
    question: SearchRequest, layout: Layout, cluster: str, ladder: Ladder, stage: Stage
) -> str | None:
    """Return the command that trains a layout as a stage of a ladder; None if there is none."""
    card = question.card
    row = None if card.path else shipped_row(card, ladder, stage)  # that of the card's name
    shipped = row.layout if row is not None and row.cluster == cluster else None
    recipe = Recipe(card=card, ladder=ladder, stage=stage, cluster=cluster, shipped=shipped)
    workload = recipe.workload(layout, question.cluster)
    if next(violations(workload, question.cluster), None) is not None:
        return None
    return Case(recipe=recipe, plan=plan_of(workload, question.cluster)).command(workload)


def _refuse(beside: str, options: dict[str, object]) -> None:
    """Raise ValueError for an option that would have no effect."""
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(f"{' and '.join(given)} cannot go with {beside}; leave one of them out")


def _longest(question: SearchRequest, words: str) -> SearchRequest:
    """Return the question at the longest context that fits; raise NoLayoutError if none does."""
    if not words:
        length = max_length(question)
        if not length:
            raise NoLayoutError(why_not(question, search(question)))
        return question.at_length(length)
    layout = _layout(question, words)

    def fits(length: int) -> bool:
        asked = question.at_length(length)
        return (
            not before_planning(asked.workload(layout), asked.cluster) and asked.plan(layout).fits
        )

    length = longest(fits)
    if not length:
        raise NoLayoutError(f"--layout {words} fits no length from {K:,} tokens on")
    return question.at_length(length)


def _layout(question: SearchRequest, words: str) -> Layout:
    layout = layout_from(words)
    if layout.world_size != question.gpus:
        raise ValueError(
            f"--layout has {layout.world_size} ranks and {question.gpus} GPUs are asked for; "
            "set --nodes, or dp"
        )
    return layout


def _as_asked(question: SearchRequest, words: str) -> SearchResult:
    """Return the plan of a layout of the user's; raise NoLayoutError if it does not work."""
    layout = _layout(question, words)
    broken = before_planning(question.workload(layout), question.cluster)
    if broken:
        raise NoLayoutError(f"--layout {words}: {broken}")
    one = question.plan(layout)
    if one.fits:
        return SearchResult(plans=[one], tried=1, given=True)
    said = f"--layout {words} {lacks(one)} at {question.seq_length:,} tokens"
    other = search(question).automatic
    if other is not None:
        raise NoLayoutError(f"{said}; the planner would take {words_of(other.workload.layout)}")
    raise NoLayoutError(
        f"{said}, and no other layout fits; leave out --layout to see what would fit"
    )


def whole_ladder(card: str, name: str, cluster: str, gpus: int, fp8: Fp8, *, as_text: bool) -> None:
    """Plan each stage of a ladder on the same GPUs and print the bill."""
    machine = clusters.load(cluster)
    of_cards = (card,) if card else cards_of(name)
    if len(of_cards) != 1:
        which = "several cards" if of_cards else "no card in particular"
        first = of_cards[0] if of_cards else "CARD"
        raise ValueError(
            f"ladder {name} is for {which}; name one: longhaul plan {first} --ladder "
            f"{shlex.quote(name)}"
        )
    model, climbed, recomputed = combined(of_cards[0], name)
    plans: list[tuple[Plan, int]] = []
    alone: list[str] = []
    for stage in climbed.stages:
        question = of_stage(model, stage, machine, gpus=gpus, fp8=fp8)
        chosen = automatic(question)
        plans.append((chosen, stage.tokens))
        layout = chosen.workload.layout
        alone.append(
            stage_command(question, layout, cluster, climbed, stage)
            or f"# no command trains {recipe_name(model, climbed, stage)} as it is planned"
        )
    whole, explained = _trains_all(model, climbed, cluster, gpus, fp8)
    if whole:
        bill(model, climbed, machine, plans, as_text=as_text, command=whole)
    else:
        of_stages = [on_one_line(command) or None for command in alone]
        bill(model, climbed, machine, plans, as_text=as_text, command=None, of_stages=of_stages)
    if other := of_other_cards(climbed, model):
        note(f"note: {other}")
    for said in recomputed:
        note(f"note: {said}")
    if as_text:
        return
    if whole:
        typer.echo(f"train it:\n  {after_comments(whole, explained)}")
        return
    typer.echo("train it, one stage after another:")
    lines = [line for command in alone for line in f"  {command}".splitlines()]
    comments = dict.fromkeys(line for line in lines if line.startswith("  # "))
    for line in (*comments, *(line for line in lines if line not in comments)):
        typer.echo(line)


def _trains_all(
    card: ModelCard, ladder: Ladder, cluster: str, gpus: int, fp8: Fp8
) -> tuple[str, str]:
    """Return the command that trains all stages as planned, and what explains it; empty if none.

    `longhaul run` lays stages out in bf16, and those for CPU ranks on CPU ranks. On one node it is
    this machine's.
    """
    rows = [shipped_row(card, ladder, stage) for stage in ladder.stages]
    on_cpu = any(row is not None and row.layout.device == "cpu" for row in rows)
    if on_cpu or fp8.recipe != "none":
        return "", ""
    if gpus <= clusters.load(cluster).gpus_per_node:
        here = f"longhaul run --ladder {ladder.word} --card {card.word}"
        return f"{here} --cluster {shlex.quote(cluster)} {sized(gpus, cluster)}", ""
    submitted = OnCluster(card=card, ladder=ladder, cluster=cluster, gpus=gpus)
    return submitted.command, submitted.explained
