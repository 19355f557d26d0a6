# SPDX-License-Identifier: Apache-2.0
"""One recipe as a row: a card, a stage of a ladder, and the layout that fits; light."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from recipes.spec import cluster
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import recipe_name
from recipes.spec.stage import Ladder, Stage

if TYPE_CHECKING:
    from recipes.pretrain import PretrainRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A card, a stage of a ladder, and how it is laid out; a call returns the recipe."""

    card: ModelCard
    ladder: Ladder
    seq_length: int
    cluster: str
    """Name of the cluster file it is laid out for; `local` for CPU ranks."""
    nodes: int
    layout: Layout
    variant: str = ""
    """End of the name of a further row of a stage, such as `fp8` or `on_1xh100`; empty
    for its first row."""
    pinned: str = ""
    """What stands behind nodes and layout where the planner does not choose them, by the rule of
    `recipes.shipped.regenerate`; empty where it does."""
    variant_source: str = ""
    """The source of a variant whose layout the planner chooses."""

    def __call__(self, nodes: int | None = None) -> "PretrainRecipe":
        """Return the recipe, a `nemo_run.Partial`, on these nodes or on its own; needs NeMo.

        Raises ValueError where the nodes do not hold a whole number of replicas.
        """
        from data.cuda_extension import during_import

        with during_import():  # in Python no command has named one
            from recipes.pretrain import pretrain

        nodes = self.nodes if nodes is None else nodes
        return pretrain(
            self.card,
            self.ladder,
            self.seq_length,
            self.on(nodes),
            nodes=nodes,
            machines=None if self.cluster == "local" else cluster.load(self.cluster),
        )

    @property
    def stage(self) -> Stage:
        """The stage of the ladder."""
        return self.ladder[self.seq_length]

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        return f"{self.stage_name}_{self.variant}" if self.variant else self.stage_name

    @property
    def stage_name(self) -> str:
        """The name of its stage, which its folder in a run has."""
        return recipe_name(self.card, self.ladder, self.stage)

    @property
    def planned(self) -> bool:
        """Whether the planner chooses nodes and layout."""
        return not self.pinned

    @property
    def source(self) -> str:
        """What stands behind nodes and layout."""
        planned = f"planned: the fewest nodes, from {self.cluster}, that end the stage in ten days"
        return "; ".join(filter(None, (self.pinned or planned, self.variant_source)))

    def on(self, nodes: int) -> Layout:
        """Return the layout with as many data ranks as `nodes` nodes have room for.

        CPU ranks stay as many as they are, spread over the nodes. Raises ValueError where the nodes
        do not hold a whole number of replicas.
        """
        if self.layout.device == "cpu":
            return self.layout
        dp, rest = divmod(self.layout.dp * nodes, self.nodes)
        if rest or not dp:
            model_ranks = self.layout.world_size // self.layout.dp
            raise ValueError(
                f"{self.name} takes {model_ranks} ranks a replica; {nodes} nodes of "
                f"{self.layout.world_size // self.nodes} do not hold a whole number of them"
            )
        return replace(self.layout, dp=dp)
