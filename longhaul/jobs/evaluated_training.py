# SPDX-License-Identifier: Apache-2.0
"""Training that evaluates the model at some steps; what each rank runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run

from slurm import entrypoint


def train_and_evaluate(config: str, every: int) -> None:
    """Train the stage of a recipe file, and evaluate it every few steps (0: by its own time)."""

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

    entrypoint.train(config, change=add_callback)
