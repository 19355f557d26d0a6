# SPDX-License-Identifier: Apache-2.0
"""Any card on any stage of any ladder, as `longhaul pretrain --card` has them."""

from collections.abc import Iterator

from recipes.ladders import LADDERS
from recipes.models import CARDS, TINY
from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.cluster import CLUSTER
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import length_from, length_shown, recipe_name
from recipes.spec.stage import Ladder, Stage
from recipes.spec.suggest import list_of, lookup


def notes(row: Row) -> Iterator[str]:
    """Yield a sentence for each thing that a user may not have meant."""
    other = of_other_cards(row.ladder, row.card)
    if other:
        why = rotation_refusal(row.card, row.stage)
        yield f"{other}: {why}" if why else other
    if row.name in ROWS and ROWS[row.name].layout != row.layout:
        shipped = ROWS[row.name]
        yield f"{row.name} is shipped with another layout ({shipped.source}): --factory {row.name}"


def choose(
    card: str,
    ladder: str,
    stage: str,
    *,
    nodes: int | None = None,
    cluster_name: str | None = None,
    device: str | None = None,
) -> Row:
    """Return what the words name as a row, laid out by the planner.

    The card `tiny` on the CPU is laid out as its rows are. Raises ValueError for names there are
    not, for a rotation that is not of the card's heads, and where no layout fits.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"--nodes is {nodes}; it must be at least 1")
    model, climbed, chosen = _named(card, ladder, stage)
    if model is TINY and device == "cpu":
        if nodes is not None or cluster_name is not None:
            raise ValueError("--nodes and --cluster are of GPUs; leave them out with --device cpu")
        return Row(
            card=model,
            ladder=climbed,
            seq_length=chosen.seq_length,
            layout=_on_two_cores(climbed, chosen),
            nodes=1,
            cluster="local",
            pinned="laid out for two cores",
        )
    return planned_row(model, climbed, chosen, cluster_name or CLUSTER, nodes or 1)


def planned_row(
    card: ModelCard, ladder: Ladder, stage: Stage, cluster_name: str, nodes: int
) -> Row:
    """Return a row with the fastest layout on that many nodes; ValueError where none fits."""
    return Row(
        card=card,
        ladder=ladder,
        seq_length=stage.seq_length,
        layout=layout_for(card, ladder, stage, cluster_name, nodes),
        nodes=nodes,
        cluster=cluster_name,
        pinned=f"planned for {nodes} x {cluster_name}",
    )


def row_of(
    card: str, ladder: str, stage: str, *, nodes: int | None, cluster_name: str | None
) -> Row:
    """Return what the words name as a row: the shipped one, or one on the fewest nodes that fit.

    Nodes or a cluster that are named are taken. Of `tiny` that is its layout for the CPU.
    """
    model, climbed, chosen = _named(card, ladder, stage)
    shipped = ROWS.get(recipe_name(model, climbed, chosen))
    if nodes is None and cluster_name is None:
        if shipped is not None:
            return shipped
        if model is TINY:
            return choose(card, ladder, stage, device="cpu")
    if nodes is None:
        nodes = fewest_nodes(model, chosen, cluster_name or CLUSTER)
    return choose(card, ladder, stage, nodes=nodes, cluster_name=cluster_name)


def _named(card: str, ladder: str, stage: str) -> tuple[ModelCard, Ladder, Stage]:
    """Return what the words name; raise ValueError where that is not one, or cannot be trained."""
    for kind, word, there in (("card", card, CARDS), ("ladder", ladder, LADDERS)):
        if not word:
            raise ValueError(f"--{kind} is missing; {list_of(there, kind)}")
    model, climbed = lookup("card", card, CARDS), lookup("ladder", ladder, LADDERS)
    chosen = stage_of(climbed, stage)
    require_heads(model, climbed, chosen)
    return model, climbed, chosen


def require_heads(card: ModelCard, ladder: Ladder, stage: Stage) -> None:
    """Raise ValueError where heads of a card cannot be turned by a stage's rotation at all."""
    refused = heads_refusal(card, stage)
    if refused is not None:
        raise ValueError(f"ladder {ladder.name} cannot train {card.name}: {refused}")


def fewest_nodes(card: ModelCard, stage: Stage, cluster_name: str) -> int | None:
    """Return the fewest nodes, of those `recipes.shipped.regenerate` tries, where a layout fits."""
    from recipes.planner.search import fits_somehow, of_stage
    from recipes.shipped.regenerate import MOST_NODES, ODD_NODES
    from recipes.spec.layout import Fp8

    machines = cluster.load(cluster_name)
    nodes = ODD_NODES.get(card.name, 1)
    while nodes <= MOST_NODES:
        gpus = nodes * machines.gpus_per_node
        if fits_somehow(of_stage(card, stage, machines, gpus=gpus, fp8=Fp8())):
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
    card: ModelCard, ladder: Ladder, stage: Stage, cluster_name: str, nodes: int
) -> Layout:
    """Return the fastest layout of a stage on so many nodes; raise ValueError where none fits."""
    from recipes.planner.search import best

    machines = cluster.load(cluster_name)
    try:
        plan = best(card, stage, machines, gpus=nodes * machines.gpus_per_node)
    except ValueError as error:
        each = f"a node of {machines.name} has {machines.gpus_per_node} GPUs"
        raise ValueError(f"ladder {ladder.name}: {error} ({each})") from error
    return plan.workload.layout


def rotation_refusal(card: ModelCard, stage: Stage) -> str | None:
    """Return why the rotation of a stage would be wrong for a card, or None."""
    rope, native = stage.rope, card.native_rope
    if rope == "native":
        return None
    of_heads = heads_refusal(card, stage)
    if of_heads is not None:
        return of_heads
    if native.method not in ("default", "llama3"):
        return f"{card.name} is stretched by {native.method} already"
    if rope.method == "default" and native.method == "llama3":
        return f"a base alone takes away the scaling that {card.name} was trained with"
    if rope.method == "default":
        replaced = rope.base >= native.base
        return None if replaced else f"base {rope.base:,.10g} is below that of {card.name}"
    plain = native.original_length or card.native_context
    if (rope.base, rope.original_length) != (native.base, plain):
        return f"{card.name} was trained at base {native.base:,.10g} on {plain:,} tokens"
    return None


def heads_refusal(card: ModelCard, stage: Stage) -> str | None:
    """Return why heads of the card cannot be turned by a stage's rotation at all, or None."""
    rope, native = stage.rope, card.native_rope
    if rope == "native":
        return None
    if rope.partial_rotary_factor != native.partial_rotary_factor:
        return (
            f"{card.name} turns {native.partial_rotary_factor:g} of a head, and the rotation is "
            f"for {rope.partial_rotary_factor:g} of one"
        )
    if rope.long_factor is not None and 2 * len(rope.long_factor) != card.head_dim:
        divisors = len(rope.long_factor)
        return (
            f"its rotation has {divisors} divisors, for heads of {2 * divisors}, and heads of "
            f"{card.name} have {card.head_dim}"
        )
    return None


def _on_two_cores(ladder: Ladder, stage: Stage) -> Layout:
    """Return the layout of tiny's row, or for a stage that has none that of its longer ones."""
    row = ROWS.get(recipe_name(TINY, ladder, stage))
    if row is not None:
        return row.layout
    return Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu")


def of_other_cards(ladder: Ladder, card: ModelCard) -> str:
    """Return in a sentence that a ladder's rotations are for other cards; empty where they fit."""
    if not ladder.cards or card.name in ladder.cards:
        return ""
    return (
        f"ladder {ladder.name} is for {', '.join(ladder.cards)}; its rotations were not chosen for "
        f"{card.name}, which is trained at {card.native_context:,} tokens"
    )
