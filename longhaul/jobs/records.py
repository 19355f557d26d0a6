# SPDX-License-Identifier: Apache-2.0
"""Records in the folder of a stage: its resolved recipe and its facts."""

from typing import Any

import fiddle as fdl
import nemo_run

from custom_modules.rope.config import RopeScaling
from eval.run_folder import write_json
from recipes.checkpoints.marker import RECIPE
from recipes.resolved import yaml_file
from recipes.resolved.read import folder_of, tokens_per_batch, trained_length, world_size


def record(recipe: nemo_run.Partial, start: str) -> None:
    """Write the stage's resolved recipe and its facts into its folder."""
    folder, config, strategy = folder_of(recipe), recipe.model.config, recipe.trainer.strategy
    yaml_file.write(recipe, folder / RECIPE)
    tp = int(strategy.tensor_model_parallel_size)
    cp = int(strategy.context_parallel_size)
    pp = int(strategy.pipeline_model_parallel_size)
    write_json(
        folder / "stage.json",
        {
            "name": recipe.log.name,
            "seq_length": recipe.data.seq_length,
            "target_length": trained_length(recipe),
            "rope": _described_rotation(fdl.build(config.rope)),
            "tokens": recipe.trainer.max_steps * tokens_per_batch(recipe),
            "tokens_per_batch": tokens_per_batch(recipe),
            "layout": {"tp": tp, "cp": cp, "pp": pp, "dp": world_size(recipe) // (tp * cp * pp)},
            "start": start,
        },
    )


def _described_rotation(rope: RopeScaling) -> dict[str, Any]:
    """Return the rotation as a report shows it; LongRoPE's divisors are in the recipe."""
    content = {"method": rope.method, "base": rope.base, "factor": rope.factor} | rope.to_dict()
    for name in ("short_factor", "long_factor"):
        content.pop(name, None)
    if rope.before is not None:
        content["before"] = rope.before.method
    return {**content, "temperature": rope.temperature}
