# SPDX-License-Identifier: Apache-2.0
"""The commands that train what `longhaul plan` has laid out, as a stage or as a whole ladder."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from longhaul.doctor.case import Case, Recipe, after_comments
from longhaul.terminal.next_commands import OnCluster, new_ladder, of_store, sized
from recipes.ladders import LADDERS
from recipes.planner.feasibility import violations
from recipes.planner.plan import plan as plan_of
from recipes.planner.search.request import SearchRequest
from recipes.shipped.rotation import is_possible, of_other_cards, rotation_refusal
from recipes.shipped.select import shipped_row
from recipes.shipped.table import ROWS
from recipes.spec import cluster as clusters
from recipes.spec.layout import Fp8, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import amount, budget_word, length_word
from recipes.spec.stage import Ladder, Stage


class TrainedAsStage(NamedTuple):
    """The command that trains a layout as a stage of a ladder, below its comments."""

    ladder: Ladder
    command: str
    new: str = ""
    """The command that writes the ladder first; empty for one that is there."""


def trained_as_stage(
    question: SearchRequest,
    layout: Layout,
    cluster: str,
    *,
    batch: int | None = None,
    budget: int | None = None,
    store: Path | None = None,
) -> TrainedAsStage | None:
    """Return how to train a layout as a stage that a ladder has for the card.

    Batch and budget are then those of the stage; a comment says so if others were asked for. The
    card's own ladders come first, then those of other cards, with a comment; one whose rotation
    does not suit the card is left out. Returns None if no ladder has a stage that the layout can
    train.
    """
    card = question.card
    stages = [
        (card.name not in ladder.cards, ladder, stage)
        for ladder in LADDERS.values()
        for stage in ladder.stages
        if stage.seq_length == question.seq_length and is_possible(ladder, card, stage.seq_length)
    ]
    for of_others, ladder, stage in sorted(stages, key=lambda one: one[0]):
        if of_others and rotation_refusal(card, stage) is not None:
            continue
        command = stage_command(question, layout, cluster, ladder, stage, store)
        if command is not None:
            other = of_other_cards(ladder, card) if of_others else ""
            said = after_comments(
                command, other, _of_the_stage(stage, batch, budget), _across(question, stage)
            )
            return TrainedAsStage(ladder, said)
    return None


def own_ladder(
    question: SearchRequest, layout: Layout, cluster: str, budget: int, store: Path | None = None
) -> TrainedAsStage:
    """Return how to train a layout as the only stage of a ladder that is written for it."""
    from recipes.notation import ladder_file  # here: it imports pydantic

    card, batch = question.card, question.tokens_per_batch
    file, new = new_ladder(card, question.seq_length)
    new += f" --tokens {budget_word(budget)} --tokens-per-batch {length_word(batch).upper()}"
    text = ladder_file.of_one_stage(
        Path(file), card, seq_length=question.seq_length, tokens=budget, tokens_per_batch=batch
    )
    ladder = replace(ladder_file.from_text(text, Path(file), card), path=file)
    recipe = Recipe(
        card=card, ladder=ladder, stage=ladder.stages[0], cluster=cluster, store=store
    )  # fmt: skip
    workload = recipe.workload(layout, question.cluster)
    case = Case(recipe=recipe, plan=plan_of(workload, question.cluster))
    said = after_comments(case.command(workload), _across(question, ladder.stages[0]))
    return TrainedAsStage(ladder, said, new)


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


def _across(question: SearchRequest, stage: Stage) -> str:
    """Return a sentence if a plan within documents is for a stage that attends across them."""
    if question.documents is None or stage.documents == "within":
        return ""
    return (
        "the stage's attention goes across documents, so it takes the time of a plan without "
        "--store; data.documents=within keeps it within them"
    )


def stage_command(
    question: SearchRequest,
    layout: Layout,
    cluster: str,
    ladder: Ladder,
    stage: Stage,
    store: Path | None = None,
) -> str | None:
    """Return the command that trains a layout as a stage of a ladder; None if there is none."""
    card = question.card
    row = None if card.path else shipped_row(card, ladder, stage)  # that of the card's name
    if row is not None:
        rows = [one for one in ROWS.values() if one.stage_name == row.name]
        row = next((one for one in rows if (one.cluster, one.layout) == (cluster, layout)), row)
    shipped = row if row is not None and row.cluster == cluster else None
    recipe = Recipe(
        card=card, ladder=ladder, stage=stage, cluster=cluster, shipped=shipped, store=store
    )
    workload = recipe.workload(layout, question.cluster)
    if next(violations(workload, question.cluster), None) is not None:
        return None
    return Case(recipe=recipe, plan=plan_of(workload, question.cluster)).command(workload)


def trains_all(
    card: ModelCard,
    ladder: Ladder,
    cluster: str,
    gpus: int,
    fp8: Fp8,
    store: Path | None = None,
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
        words = [here, f"--cluster {shlex.quote(cluster)}", sized(gpus, cluster), *of_store(store)]
        return " ".join(words), ""
    submitted = OnCluster(card=card, ladder=ladder, cluster=cluster, gpus=gpus, store=store)
    return submitted.command, submitted.explained
