# SPDX-License-Identifier: Apache-2.0
"""Any card on any stage of any ladder, as `longhaul pretrain --card` has them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longhaul.facts import of_other_cards
from longhaul.options import CLUSTER
from recipes import cluster
from recipes.collection import ROWS
from recipes.ladders import LADDERS
from recipes.layout import ContextParallel, Layout
from recipes.model_card import ModelCard
from recipes.models import CARDS, TINY
from recipes.naming import length_from, length_shown, recipe_name
from recipes.nearest import named
from recipes.stages import Ladder, Stage

if TYPE_CHECKING:
    import nemo_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A recipe that no row is needed for."""

    card: ModelCard
    ladder: Ladder
    stage: Stage
    layout: Layout
    nodes: int

    def recipe(self) -> "nemo_run.Partial":
        """Return the recipe; needs NeMo."""
        from recipes.pretrain import pretrain

        return pretrain(
            self.card, self.ladder, self.stage.seq_length, self.layout, nodes=self.nodes
        )

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each thing that a user may not have meant."""
        other = of_other_cards(self.ladder, self.card)
        if other:
            yield other
        name = recipe_name(self.card, self.ladder, self.stage)
        if name in ROWS and ROWS[name].layout != self.layout:
            yield f"{name} is shipped with another layout ({ROWS[name].source}): --factory {name}"


def choose(
    card: str,
    ladder: str,
    stage: str,
    *,
    nodes: int | None = None,
    cluster_name: str | None = None,
    device: str | None = None,
) -> Combination:
    """Return what the words name, laid out by the planner.

    The card `tiny` on the CPU is laid out as its rows are. Raises ValueError for names there are
    not, and where no layout fits.
    """
    for option, word, there in (("--card", card, CARDS), ("--ladder", ladder, LADDERS)):
        if not word:
            raise ValueError(f"{option} is missing; there are {', '.join(there)}")
    if nodes is not None and nodes < 1:
        raise ValueError(f"--nodes is {nodes}; it must be at least 1")
    model, climbed = named("card", card, CARDS), named("ladder", ladder, LADDERS)
    chosen = stage_of(climbed, stage)
    if model is TINY and device == "cpu":
        if nodes is not None or cluster_name is not None:
            raise ValueError("--nodes and --cluster are of GPUs; leave them out with --device cpu")
        layout, nodes = _on_two_cores(climbed, chosen), 1
    else:
        nodes = nodes or 1
        layout = layout_for(model, climbed, chosen, cluster_name or CLUSTER, nodes)
    return Combination(card=model, ladder=climbed, stage=chosen, layout=layout, nodes=nodes)


def stage_of(ladder: Ladder, word: str) -> Stage:
    """Return the stage of a length such as 64K; the only one of a ladder needs no word."""
    if not word and len(ladder.stages) == 1:
        return ladder.stages[0]
    there = {length_shown(stage.seq_length): stage for stage in ladder.stages}
    if not word:
        raise ValueError(f"--stage is missing; ladder {ladder.name} has {', '.join(there)}")
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
        raise ValueError(f"ladder {ladder.name}: {error}") from error
    return plan.job.layout


def _on_two_cores(ladder: Ladder, stage: Stage) -> Layout:
    """Return the layout of tiny's row, or for a stage that has none that of its longer ones."""
    row = ROWS.get(recipe_name(TINY, ladder, stage))
    if row is not None:
        return row.layout
    return Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu")
