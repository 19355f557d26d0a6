# SPDX-License-Identifier: Apache-2.0
"""Any card on any stage of any ladder, as `longhaul pretrain --card` has them."""

from collections.abc import Iterator
from dataclasses import replace

from recipes.models import TINY
from recipes.notation.layout import words_of
from recipes.shipped.machines import (
    BY_LAYOUT,
    STATED,
    Machines,
    nodes_for,
    on_machines,
    stated_layout,
)
from recipes.shipped.named import combined, ladder_named
from recipes.shipped.rotation import for_card, of_other_cards
from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.cluster import CLUSTER
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import counted, length_from, length_shown, recipe_name
from recipes.spec.stage import Ladder, Stage


def notes(row: Row) -> Iterator[str]:
    """Yield a sentence for each thing that a user may not have meant."""
    other = of_other_cards(row.ladder, row.card)
    if other:
        yield other
    yield from row.card.notes
    stated = ladder_named(row.ladder.path or row.ladder.name, row.card)
    yield from for_card(stated, row.card, row.seq_length)[1]
    yield from short(row)
    shipped = shipped_row(row.card, row.ladder, row.stage)
    if shipped is not None and shipped.layout != row.layout:
        yield f"{row.name} is shipped with another layout ({shipped.source}): --factory {row.name}"


def short(row: Row) -> Iterator[str]:
    """Yield a sentence if a layout that the planner did not choose has too little memory.

    The planner chose that of a shipped row for the row's own cluster.
    """
    moved = row.name in ROWS and row.cluster != ROWS[row.name].cluster
    if (row.pinned not in STATED and not moved) or row.layout.device == "cpu":
        return
    from recipes.planner.search.alternatives import lacks
    from recipes.planner.search.request import of_stage

    machine, layout = cluster.load(row.cluster), row.layout
    question = of_stage(row.card, row.stage, machine, gpus=layout.world_size, fp8=layout.fp8)
    plan = question.plan(layout)
    if not plan.fits:
        yield (
            f"by the plan, {row.name} under the layout {words_of(layout)!r} {lacks(plan)} on "
            f"{machine.name}"
        )


def shipped_row(card: ModelCard, ladder: Ladder, stage: Stage) -> Row | None:
    """Return the shipped recipe of a card and a ladder by their own names; None if there is none.

    Card and ladder are compared too, because two pairs of names can give one recipe name.
    """
    row = ROWS.get(recipe_name(card, ladder, stage))
    if row is None or (row.card.name, row.ladder.name) != (card.name, ladder.name):
        return None
    return row


def choose(card: str, ladder: str, stage: str, asked: Machines | None = None) -> Row:
    """Return what the words name as a row, on the machines asked for, laid out by the planner.

    Raises ValueError for names there are not, for a rotation that is not of the card's heads, and
    where no layout fits.
    """
    model, climbed, _ = combined(card, ladder, stage)
    return placed_row(model, climbed, stage_of(climbed, stage), asked or Machines())


def placed_row(card: ModelCard, ladder: Ladder, stage: Stage, asked: Machines) -> Row:
    """Return a stage on the machines asked for: on CPU ranks, in the layout of words, or planned.

    The card `tiny` on the CPU is laid out as its rows are. Raises ValueError where no layout fits.
    """
    if asked.on_cpu:
        return on_machines(cpu_row(card, ladder, stage), asked)
    if not asked.layout:
        return planned_row(card, ladder, stage, asked.cluster or CLUSTER, asked.gpus_in_all)
    layout = stated_layout(recipe_name(card, ladder, stage), card, stage, asked)
    return Row(
        card=card,
        ladder=ladder,
        seq_length=stage.seq_length,
        layout=layout,
        nodes=nodes_for(layout, asked.hardware),
        cluster=asked.cluster or CLUSTER,
        pinned=BY_LAYOUT,
    )


def cpu_row(card: ModelCard, ladder: Ladder, stage: Stage) -> Row:
    """Return a row on CPU ranks of this machine: the shipped one, or two ranks of CP."""
    shipped = shipped_row(card, ladder, stage)
    if shipped is not None and shipped.layout.device == "cpu":
        return replace(shipped, card=card, ladder=ladder)
    ulysses = card.heads % 2 == card.kv_heads % 2 == 0
    cp = ContextParallel.ulysses(2) if ulysses else ContextParallel.ring(2)
    return Row(
        card=card,
        ladder=ladder,
        seq_length=stage.seq_length,
        layout=Layout(cp=cp, precision="fp32", device="cpu"),
        nodes=1,
        cluster="local",
        pinned="laid out for two cores",
    )


def planned_row(card: ModelCard, ladder: Ladder, stage: Stage, cluster_name: str, gpus: int) -> Row:
    """Return a row with the fastest layout on that many GPUs; ValueError where none fits."""
    machine = cluster.load(cluster_name)
    layout = layout_for(card, ladder, stage, cluster_name, gpus)
    nodes = nodes_for(layout, machine)
    part = f"{counted(gpus, 'GPU')} of"
    whole = gpus == nodes * machine.gpus_per_node
    return Row(
        card=card,
        ladder=ladder,
        seq_length=stage.seq_length,
        layout=layout,
        nodes=nodes,
        cluster=cluster_name,
        pinned=f"planned for {f'{nodes} x' if whole else part} {machine.name}",
    )


def row_of(
    card: str, ladder: str, stage: str, asked: Machines, usual_cluster: str = CLUSTER
) -> Row:
    """Return what the words name as a row: the shipped one, or one on the fewest nodes that fit.

    Machines that are named are taken; nodes are of the usual cluster if none is. Of `tiny` that is
    its layout for the CPU.
    """
    model, climbed, _ = combined(card, ladder, stage)
    chosen = stage_of(climbed, stage)
    shipped = shipped_row(model, climbed, chosen)
    if not asked.sized and not asked.cluster:
        if shipped is not None:
            return replace(shipped, card=model, ladder=climbed)
        if model is TINY:
            return cpu_row(model, climbed, chosen)
    if not asked.on_cpu:
        asked = replace(asked, cluster=asked.cluster or usual_cluster)
    if not asked.sized:
        asked = replace(asked, nodes=fewest_nodes(model, chosen, asked.cluster))
    return placed_row(model, climbed, chosen, asked)


def fewest_nodes(card: ModelCard, stage: Stage, cluster_name: str) -> int | None:
    """Return the fewest nodes, of those `recipes.shipped.regenerate` tries, where a layout fits."""
    from recipes.planner.search.ranking import fits
    from recipes.planner.search.request import of_stage
    from recipes.shipped.regenerate import MOST_NODES
    from recipes.spec.layout import Fp8

    machines = cluster.load(cluster_name)
    nodes = 1
    while nodes <= MOST_NODES:
        gpus = nodes * machines.gpus_per_node
        if fits(of_stage(card, stage, machines, gpus=gpus, fp8=Fp8())):
            return nodes
        nodes *= 2
    return None


def stage_of(ladder: Ladder, word: str) -> Stage:
    """Return the stage of a length such as 64K; the only one of a ladder needs no word."""
    if not word and len(ladder.stages) == 1:
        return ladder.stages[0]
    there = {length_shown(stage.seq_length): stage for stage in ladder.stages}
    if not word:
        raise ValueError(
            f"--stage is missing; name one of ladder {ladder.name}, which has {', '.join(there)}"
        )
    shown = length_shown(length_from(word))
    if shown not in there:
        raise ValueError(f"ladder {ladder.name} has no stage of {shown}; it has {', '.join(there)}")
    return there[shown]


def layout_for(
    card: ModelCard, ladder: Ladder, stage: Stage, cluster_name: str, gpus: int
) -> Layout:
    """Return the fastest layout of a stage on these GPUs; raise ValueError where none fits."""
    from recipes.planner.search.alternatives import best

    machines = cluster.load(cluster_name)
    try:
        plan = best(card, stage, machines, gpus=gpus)
    except ValueError as error:
        each = f"a node of {machines.name} has {machines.gpus_per_node} GPUs"
        raise ValueError(f"ladder {ladder.name}: {error} ({each})") from error
    return plan.workload.layout
