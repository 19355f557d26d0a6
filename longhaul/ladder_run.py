# SPDX-License-Identifier: Apache-2.0
"""What `longhaul run` decides before anything large is loaded: ladder, card, folders, store."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.store import Manifest
from recipes.collection import ROWS
from recipes.ladders import LADDERS
from recipes.model_card import ModelCard
from recipes.models import CARDS
from recipes.naming import family_name, recipe_name, run_folder, store_folder
from recipes.nearest import named
from recipes.stages import Ladder

if TYPE_CHECKING:
    import nemo_run


@dataclass(frozen=True)
class Plan:
    """Hold what is run and where it writes and reads."""

    ladder: Ladder
    card: ModelCard
    run: Path
    store: Path

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return family_name(self.card, self.ladder)

    @property
    def stage_names(self) -> list[str]:
        """Recipe names in order."""
        return [recipe_name(self.card, self.ladder, stage) for stage in self.ladder.stages]


def choose(ladder: str, card: str | None) -> tuple[Ladder, ModelCard]:
    """Return ladder and card; raise ValueError for unknown ones and for a card to be chosen."""
    chosen = named("ladder", ladder, LADDERS)
    rows = [row for row in ROWS.values() if row.ladder.name == ladder]
    fitting = list(dict.fromkeys(row.card.name for row in rows))
    if card is None and len(fitting) > 1:
        raise ValueError(f"ladder {ladder} has several cards; name one: --card {fitting[0]}")
    if card is not None and card not in fitting:
        raise ValueError(f"ladder {ladder} has no card {card!r}; it has {', '.join(fitting)}")
    return chosen, CARDS[card or fitting[0]]


def plan(ladder: Ladder, card: ModelCard, run: Path | None, store: Path | None) -> Plan:
    """Return the plan with the places that convention gives where none are named."""
    return Plan(
        ladder=ladder,
        card=card,
        run=run or run_folder(card, ladder),
        store=store or store_folder(card),
    )


def require_store(plan: Plan) -> None:
    """Make the store of a card that is trained from scratch; for another, raise ValueError.

    A store that is there is looked at, so that one that cannot be used is refused at once.
    """
    if plan.store.exists():
        Manifest.load(plan.store)
        return
    if plan.card.hf_id is not None:
        raise ValueError(
            f"there is no token store at {plan.store}; make one: "
            f"longhaul prepare --source DOCUMENTS --tokenizer {plan.card.hf_id} --out {plan.store}"
        )
    from longhaul.prepare import prepare

    prepare(out=plan.store, vocab_size=plan.card.vocab)


def describe(plan: Plan, recipes: "list[nemo_run.Partial]") -> None:
    """Print a line a stage: what it trains, how long, on how many ranks, from what."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{plan.card.name} on ladder {plan.ladder.name} -> {plan.run}")
    for column in ("stage", "tokens", "RoPE", "steps", "tokens/step", "ranks", "starts from"):
        table.add_column(column, justify="right" if "tokens" in column else "left")
    for name, recipe in zip(plan.stage_names, recipes, strict=True):
        table.add_row(name, *_row(recipe))
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)


def _row(recipe: "nemo_run.Partial") -> tuple[str, ...]:
    rope: Any = recipe.model.config.rope
    rotation = f"{rope.method}, base {rope.base:,.0f}"
    if rope.method != "default":
        rotation += f", factor {rope.factor:g}"
    strategy = recipe.trainer.strategy
    ranks = int(recipe.trainer.devices) * int(recipe.trainer.num_nodes)
    kinds = {
        "TP": strategy.tensor_model_parallel_size,
        "CP": strategy.context_parallel_size,
        "PP": strategy.pipeline_model_parallel_size,
    }
    dp = ranks
    for size in kinds.values():
        dp //= size
    layout = " ".join(f"{kind}{size}" for kind, size in {**kinds, "DP": dp}.items() if size > 1)
    start = recipe.resume.start
    return (
        f"{recipe.data.seq_length:,}",
        rotation,
        f"{recipe.trainer.max_steps:,}",
        f"{recipe.data.global_batch_size * recipe.data.seq_length:,}",
        f"{ranks} ({layout})" if layout else str(ranks),
        "random weights" if start is None else _short(Path(start)),
    )


def _short(start: Path) -> str:
    """Return the stage of a checkpoint folder, or the folder of a published model."""
    return start.parent.name if start.name == "checkpoints" else os.path.relpath(start)
