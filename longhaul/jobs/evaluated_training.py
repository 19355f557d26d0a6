# SPDX-License-Identifier: Apache-2.0
"""Training that evaluates the model at some steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import nemo_run

    from recipes.resolved.stage import ResolvedStage

Interval = int | Literal["never"]
"""Steps between evaluations of a model while it trains; 0: by their own time."""


def add_evaluations(recipe: "nemo_run.Partial", every: int) -> None:
    """Add the callback that evaluates the model every few steps (0: by its own time)."""
    import nemo_run

    from eval.while_training import WhileTraining
    from recipes.resolved.stage import ResolvedStage

    stage = ResolvedStage.of(recipe)
    recipe.trainer.callbacks.append(
        nemo_run.Config(
            WhileTraining,
            store=str(recipe.data.store),
            seq_length=stage.seq_length,
            tokens_per_batch=stage.tokens_per_batch,
            every=every,
        )
    )


def with_evaluations(stage: "ResolvedStage", given: Interval | None) -> "ResolvedStage":
    """Return the stage with the given steps between evaluations, or those that its folder records.

    A stage that is done keeps its record. Raises ValueError if the record cannot be read.
    """
    from longhaul.jobs.stage_checks import recorded

    if given is None or stage.is_done:
        record = recorded(stage)
        return replace(stage, evaluate_every=None if record is None else record.evaluate_every)
    return replace(stage, evaluate_every=None if given == "never" else given)


def describe(stages: "Sequence[ResolvedStage]", given: Interval | None) -> list[str]:
    """Return how each stage that is left is evaluated while it trains; nothing if it is not."""
    recorded = ""
    if given is None:
        recorded = ", as its stage.json records (--eval-every never turns that off)"
    return [
        f"{stage.name} is not evaluated while it trains: {reason}"
        if (reason := _reason(stage))
        else f"{stage.name} is evaluated {_when(stage.evaluate_every)} while it trains{recorded}"
        for stage in stages
        if stage.evaluate_every is not None and not stage.is_done
    ]


def _when(every: int) -> str:
    return f"every {every:,} steps" if every else "as often as takes 1% of the time"


def _reason(stage: "ResolvedStage") -> str:
    """Return why a stage is not evaluated: its layout, or its store if there is one yet."""
    from data.store import Manifest
    from eval.loss.held_out import held_out
    from eval.while_training import unsupported

    reason = unsupported(
        pipeline_parallel=stage.layout.pp,
        fp8=stage.layout.fp8.recipe != "none",
        megatron_fsdp=getattr(stage.recipe.trainer.strategy.ddp, "use_megatron_fsdp", False),
    )
    store = Path(stage.recipe.data.store)
    if not reason and store.exists():
        try:
            held_out(Manifest.load(store), stage.seq_length + 1, documents=1)
        except ValueError as error:
            return str(error)
    return reason
