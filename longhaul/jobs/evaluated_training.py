# SPDX-License-Identifier: Apache-2.0
"""Training that evaluates the model at some steps; what each rank runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run

    from recipes.resolved.stage import ResolvedStage

from slurm import entrypoint
from slurm.preflight.requirements import Expected
from slurm.preflight.run import SECONDS


def train_and_evaluate(
    config: str, every: int, expected: Expected | None = None, seconds: float = SECONDS
) -> None:
    """Train the stage of a recipe file, and evaluate it every few steps (0: by its own time).

    The machines are checked first as by `slurm.entrypoint.train`.
    """

    def add_callback(recipe: "nemo_run.Partial") -> None:
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

    entrypoint.train(config, expected=expected, seconds=seconds, change=add_callback)


def describe(stages: "Sequence[ResolvedStage]", every: int | None) -> list[str]:
    """Return how each stage that is left is evaluated while it trains; nothing without `every`."""
    if every is None:
        return []
    when = f"every {every:,} steps" if every else "as often as takes 1% of the time"
    return [
        f"{stage.name} is not evaluated while it trains: {reason}"
        if (reason := _reason(stage))
        else f"{stage.name} is evaluated {when} while it trains"
        for stage in stages
        if not stage.is_done
    ]


def _reason(stage: "ResolvedStage") -> str:
    """Return why a stage's layout is not evaluated, as `eval.while_training.unsupported` does."""
    layout = stage.layout
    if layout.pp > 1:
        return "it has pipeline stages"
    if layout.fp8.recipe != "none":
        return "it trains in FP8"
    if getattr(stage.recipe.trainer.strategy.ddp, "use_megatron_fsdp", False):
        return "its parameters are sharded by Megatron FSDP"
    return ""
