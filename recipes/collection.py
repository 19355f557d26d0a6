# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes as rows: a stage of a ladder, a card, and the layout that fits; light.

Each row is one that a source or a measurement stands behind; any other combination of card, ladder
and stage is `longhaul pretrain --card --ladder --stage`. `recipes.factories` makes the recipes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from custom_modules.activation_memory import Recompute
from recipes.ladders import LLAMA_128K, TINY_LADDER
from recipes.layout import ContextParallel, Layout
from recipes.model_card import ModelCard
from recipes.models import LLAMA31_8B, LLAMA32_1B, TINY
from recipes.naming import recipe_name
from recipes.stages import Ladder, Stage
from recipes.units import K


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One shipped recipe."""

    card: ModelCard
    ladder: Ladder
    seq_length: int
    layout: Layout
    nodes: int = 1
    source: str
    """What stands behind the layout."""

    @property
    def stage(self) -> Stage:
        """The stage of the ladder."""
        return self.ladder[self.seq_length]

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        return recipe_name(self.card, self.ladder, self.stage)

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


def _cpu(**sizes: object) -> Layout:
    return Layout(precision="fp32", device="cpu", **sizes)  # type: ignore[arg-type]


def _rows() -> Iterable[Row]:
    measured = "measured on two CPU cores"
    for length, layout in (
        (512, _cpu(dp=2, micro_batch=4)),
        (2 * K, _cpu(cp=ContextParallel.ulysses(2))),
        (8 * K, _cpu(cp=ContextParallel.ulysses(2))),
    ):
        yield Row(card=TINY, ladder=TINY_LADDER, seq_length=length, layout=layout, source=measured)
    full = Recompute(kind="full")
    for card, sizes in (
        (LLAMA31_8B, {16 * K: (2, 2, 2), 64 * K: (2, 4, 1), 128 * K: (2, 4, 1)}),
        (LLAMA32_1B, {16 * K: (1, 2, 4), 64 * K: (1, 4, 2), 128 * K: (1, 8, 1)}),
    ):
        for length, (tp, cp, dp) in sizes.items():
            layout = Layout(tp=tp, cp=ContextParallel.ulysses(cp), dp=dp, recompute=full)
            yield Row(
                card=card, ladder=LLAMA_128K, seq_length=length, layout=layout, source="planned"
            )


ROWS: dict[str, Row] = {row.name: row for row in _rows()}
