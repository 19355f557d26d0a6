# SPDX-License-Identifier: Apache-2.0
"""The table of a ladder's stages that a run prints before it starts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longhaul.jobs.ladder_run import LadderRun

if TYPE_CHECKING:
    from recipes.resolved.stage import ResolvedStage


def describe(plan: LadderRun, stages: "Sequence[ResolvedStage]") -> None:
    """Print a line per stage: its length, rotation, steps and ranks, and what it starts from."""
    from rich.table import Table

    from longhaul.terminal.console import print_left_out, show

    columns = ("stage", "tokens", "RoPE", "steps", "tokens/step", "ranks", "starts from")
    lines = [
        dict(zip(columns, (name, *_row(stage)), strict=True))
        for (name, _), stage in zip(plan.chosen, stages, strict=True)
    ]

    def table(without: Sequence[str]) -> Table:
        made = Table(title=f"{plan.card.name} on ladder {plan.ladder.name} -> {plan.run}")
        titles = [title for title in columns if title not in without]
        for title in titles:
            right = title in ("tokens", "steps", "tokens/step")
            made.add_column(title, no_wrap=True, justify="right" if right else "left")
        for line in lines:
            made.add_row(*(line[title] for title in titles))
        return made

    left_out = show(table, ("RoPE", "tokens/step", "starts from", "ranks"))
    print_left_out(lines, "stage", left_out)


def _row(stage: "ResolvedStage") -> tuple[str, ...]:
    rope: Any = stage.recipe.model.config.rope
    rotation = f"{rope.method}, base {rope.base:,.0f}"
    if rope.method != "default":
        rotation += f", factor {rope.factor:g}"
    sizes = {kind.upper(): size for kind, size in stage.layout.degrees.items() if size > 1}
    layout = " ".join(f"{kind}{size}" for kind, size in sizes.items())
    ranks, start = stage.layout.world_size, stage.recipe.resume.start
    return (
        f"{stage.seq_length:,}",
        rotation,
        f"{stage.steps:,}",
        f"{stage.tokens_per_batch:,}",
        f"{ranks} ({layout})" if layout else str(ranks),
        "random weights" if start is None else _short(Path(start)),
    )


def _short(start: Path) -> str:
    """Return the stage of a checkpoint folder, or the folder of a published model."""
    return start.parent.name if start.name == "checkpoints" else os.path.relpath(start)
