# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan`: choose the layout of a stage on given GPUs, with its memory and time."""

import shlex
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from longhaul.commands.plan_commands import own_ladder, stage_command, trained_as_stage, trains_all
from longhaul.defaults import planned_cluster
from longhaul.doctor.case import after_comments, on_one_line
from longhaul.options import (
    K_IS,
    Cluster,
    Json,
    NativeContext,
    card_at,
    length_of,
    print_json,
)
from longhaul.pages.plan_page import as_json, bill, page, several
from longhaul.terminal.messages import note
from longhaul.terminal.next_commands import not_here_yet
from recipes.constraints import fp8 as fp8_constraints
from recipes.notation.layout import layout_from, words_of
from recipes.planner.batch_size import even_batch
from recipes.planner.documents import DocumentLengths
from recipes.planner.feasibility import CUDA, before_planning
from recipes.planner.plan import Plan
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
from recipes.shipped.named import cards_of, combined
from recipes.shipped.rotation import of_other_cards
from recipes.spec import cluster as clusters
from recipes.spec.cluster import CLUSTER
from recipes.spec.extension_facts import card_facts, lines
from recipes.spec.layout import Fp8, Layout
from recipes.spec.naming import budget_from, length_from, length_shown, recipe_name
from recipes.spec.units import K, M

BATCH, BUDGET = 4 * M, 1_000_000_000
"""Tokens of a batch and of a stage where none are given: ProLong's, Nemotron-UltraLong's."""
FP8 = ("tensorwise", "blockwise", "delayed", "mxfp8")


def _counts(words: str) -> list[int]:
    """Return the numbers of `1,4,16`; raise BadParameter unless each is an integer from 1 on."""
    numbers = []
    for word in words.split(","):
        try:
            number = int(word)
        except ValueError:
            raise typer.BadParameter(
                f"{word!r} is not a valid number; expected one or several, such as 1,4,16"
            ) from None
        if number < 1:
            raise typer.BadParameter(f"{number} is not in the range x>=1.")
        numbers.append(number)
    return numbers


def plan(
    card: Annotated[str, typer.Argument(help="A model card, such as llama31_8b.")] = "",
    seq: Annotated[
        str, typer.Option(help=f"Context, such as 64K, or several: 64K,256K,1M ({K_IS}).")
    ] = "",
    ladder: Annotated[str, typer.Option(help="Plan every stage of a ladder, and its cost.")] = "",
    cluster: Cluster = "",
    nodes: Annotated[
        Any,
        typer.Option(
            parser=_counts,
            metavar="<int,...>",
            help="Nodes of the cluster, or several: 1,4,16.",
            show_default="1",
        ),
    ] = None,
    gpus: Annotated[
        Any,
        typer.Option(
            parser=_counts, metavar="<int,...>", help="GPUs, if they are not whole nodes."
        ),
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
        bool,
        typer.Option(
            "--tightest", help="Take the fastest that was tried, however full the GPUs are."
        ),
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Fit the cluster file to this run, or file of measured steps, first."),
    ] = None,
    native_context: NativeContext = "",
    store: Annotated[
        Path | None,
        typer.Option(help="Token store: count attention within documents of its lengths."),
    ] = None,
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
    counts = [gpus_of(machine, *sizes) for sizes in product(nodes or [None], gpus or [None])]
    ranks = counts[0]
    lengths = None if store is None else lengths_of(store)
    if ladder:
        _refuse(
            "--ladder, whose stages set theirs",
            {
                "--seq": seq, "--tokens-per-batch": tokens_per_batch, "--tokens": tokens,
                "--layout": layout, "--max-seq": max_seq, "--tightest": tightest, "--why": why,
                "--plot": plot, "--calibrate": calibrate, "--native-context": native_context,
            },
        )  # fmt: skip
        if counts[1:]:
            asked = ",".join(str(number) for number in nodes or gpus)
            raise ValueError(
                f"{asked} are several sizes, and a ladder is planned on one; name one of them"
            )
        whole_ladder(card, ladder, cluster, ranks, precision, store, as_text=as_text)
        return
    if not card:
        raise ValueError(
            "name a model card, as in `longhaul plan llama31_8b --seq 1M`, or --ladder"
        )
    model = card_at(card, native_context)
    if calibrate is not None:
        from longhaul.commands.calibrate import fit_to
        from longhaul.jobs.calibration import own_file

        machine = fit_to(own_file(cluster), machine, card, [calibrate], quiet=as_text)
    budget = budget_from(tokens) if tokens else BUDGET
    if max_seq:
        _refuse("--max-seq, which finds it", {"--seq": seq})
        _refuse("--max-seq", {"several numbers of GPUs": counts[1:]})
    elif not seq:
        raise ValueError("--seq is missing; add it, such as --seq 1M, or --max-seq")
    if layout:
        _refuse("--layout, which sets fp8:RECIPE itself", {"--fp8": fp8})
        _refuse("--layout", {"--tightest": tightest})
        _refuse("--layout; a plot shows the planner's own", {"--plot": plot})
    per_batch = length_of("--tokens-per-batch", tokens_per_batch) if tokens_per_batch else None
    questions = [
        SearchRequest(
            card=model,
            seq_length=length,
            tokens_per_batch=per_batch or even_batch(BATCH, length, gpus_in_all),
            cluster=machine,
            gpus=gpus_in_all,
            fp8=precision,
            documents=lengths,
        )
        for length, gpus_in_all in product(_lengths(seq) if seq else [K], counts)
    ]
    if questions[1:]:
        _refuse(
            "several lengths or numbers of GPUs", {"--layout": layout, "--why": why, "--plot": plot}
        )
        several(questions, budget, tightest=tightest, as_text=as_text)
        return
    [question] = questions
    if max_seq:
        question = _longest(question, layout)
    answer = _as_asked(question, layout) if layout else search(question, tightest=tightest)
    if not answer.plans:
        raise NoLayoutError(why_not(question, answer))
    layout_found = answer.plans[0].workload.layout
    # A ladder of one's own carries a context that is stated to the other commands.
    found = None if native_context else trained_as_stage(
        question, layout_found, cluster,
        batch=question.tokens_per_batch if tokens_per_batch else None,
        budget=budget if tokens else None, store=store,
    )  # fmt: skip
    extends = question.seq_length >= model.native_context
    own = None
    if found is None and extends:
        own = own_ladder(question, layout_found, cluster, budget, store)
    chosen = found or own
    longer = question.seq_length > model.native_context
    facts = card_facts(model, layout_found, question.seq_length) if longer else []
    first = list(not_here_yet(model, chosen.ladder, store=store)) if chosen else []
    if as_text:
        before = [*first, own.new] if own else first
        command = chosen and on_one_line(chosen.command)
        print_json(
            as_json(question, answer, budget)
            | {"first": before, "command": command, "extension_facts": list(map(asdict, facts))}
        )
    else:
        page(question, answer, budget, default_budget=not tokens, why=why)
        for words in lines(facts):
            note(f"note: {words}")
        _print_first(first)
        shown = length_shown(question.seq_length)
        if own is not None:
            typer.echo(f"no ladder has a stage of {shown} for {model.name}; write one, train it:")
            typer.echo(f"  {own.new}\n  {own.command}")
        elif chosen is not None:
            typer.echo(f"train it, as a stage of a ladder:\n  {chosen.command}")
        else:
            typer.echo(
                f"{model.name} was trained for {model.native_context:,} tokens; a ladder extends "
                "that, so no command trains it at fewer"
            )
        if max_seq:
            typer.echo(f"the longest context that fits: at least {shown} tokens")
    if plot is not None:
        from longhaul.pages.plan_plot import draw

        draw(plot, question, tightest=tightest)
        typer.echo(plot, err=as_text)


def _print_first(commands: list[str]) -> None:
    """Print the commands that make what a ladder reads and this folder does not have yet."""
    if commands:
        typer.echo("first, what is not here yet:")
        for command in commands:
            typer.echo(f"  {command}")


def _refuse(beside: str, options: dict[str, object]) -> None:
    """Raise ValueError for an option that would have no effect."""
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(f"{' and '.join(given)} cannot go with {beside}; leave one of them out")


def _lengths(words: str) -> list[int]:
    """Return the lengths of `64K,256K`; `38,400` is one length."""
    try:
        return [length_from(words)]
    except ValueError:
        if "" in (listed := words.split(",")):
            raise ValueError(
                f"--seq {words} has an empty length; expected 64K or 64K,256K"
            ) from None
        return [length_of("--seq", word) for word in listed]


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
            f"ask for {layout.world_size} by --nodes or --gpus, or name a layout of "
            f"{question.gpus} ranks (dpN adds data ranks)"
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


def lengths_of(store: Path) -> DocumentLengths:
    """Return the lengths of a store's documents for training, by its manifest.

    It counts them by powers of two; those of a bucket have its average. Raises StoreError.
    """
    from data.store import Manifest, StoreError

    buckets = Manifest.load(store).train.lengths
    if not buckets:
        raise StoreError(f"{store} has no documents for training, so no lengths to plan by")
    return DocumentLengths(
        tuple((round(one.tokens / one.documents), one.documents) for one in buckets)
    )


def whole_ladder(
    card: str,
    name: str,
    cluster: str,
    gpus: int,
    fp8: Fp8,
    store: Path | None = None,
    *,
    as_text: bool,
) -> None:
    """Plan each stage of a ladder on the same GPUs and print the bill.

    With a `store`, attention is counted within documents of its lengths, and commands name it.
    """
    machine = clusters.load(cluster)
    documents = None if store is None else lengths_of(store)
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
    as_run = True  # whether `longhaul run`, which does not know the documents, lays it out so
    for stage in climbed.stages:
        question = of_stage(model, stage, machine, gpus=gpus, fp8=fp8, documents=documents)
        chosen = automatic(question)
        plans.append((chosen, stage.tokens))
        layout = chosen.workload.layout
        if question.documents is not None:
            as_run &= automatic(replace(question, documents=None)).workload.layout == layout
        alone.append(
            stage_command(question, layout, cluster, climbed, stage, store)
            or f"# no command trains {recipe_name(model, climbed, stage)} as it is planned"
        )
    whole, explained = trains_all(model, climbed, cluster, gpus, fp8, store) if as_run else ("", "")
    of_longest, _ = max(plans, key=lambda one: one[0].workload.seq_length)
    facts = card_facts(model, of_longest.workload.layout, of_longest.workload.seq_length)
    bill(
        model, climbed, machine, plans, as_text=as_text, command=whole or None, facts=facts,
        of_stages=() if whole else [on_one_line(command) or None for command in alone],
    )  # fmt: skip
    if other := of_other_cards(climbed, model):
        note(f"note: {other}")
    for said in (*recomputed, *lines(facts)):
        note(f"note: {said}")
    if as_text:
        return
    _print_first(list(not_here_yet(model, climbed, store=store)))
    if whole:
        typer.echo(f"train it:\n  {after_comments(whole, explained)}")
        return
    typer.echo("train it, one stage after another:")
    typed = [line for command in alone for line in f"  {command}".splitlines()]
    comments = dict.fromkeys(line for line in typed if line.startswith("  # "))
    for line in (*comments, *(line for line in typed if line not in comments)):
        typer.echo(line)
