# SPDX-License-Identifier: Apache-2.0
"""Records in the folder of a stage: its resolved recipe and its facts."""

from typing import Any

import fiddle as fdl

from custom_modules.rope.config import RopeScaling
from data.files.whole import write_text
from eval.run_folder import write_json
from longhaul.version import commit
from recipes.checkpoints.marker import RECIPE
from recipes.checkpoints.record import CLUSTER, SUBMITTED
from recipes.resolved import yaml_file
from recipes.resolved.stage import ResolvedStage
from recipes.spec.cluster import path_of


def record(stage: ResolvedStage, start: str) -> None:
    """Write the stage's resolved recipe and its facts into its folder."""
    yaml_file.write(stage.recipe, stage.folder / RECIPE)
    write_json(
        stage.folder / "stage.json",
        {
            "name": stage.name,
            "seq_length": stage.seq_length,
            "target_length": stage.trained_length,
            "rope": _described_rotation(fdl.build(stage.recipe.model.config.rope)),
            "tokens": stage.steps * stage.tokens_per_batch,
            "tokens_per_batch": stage.tokens_per_batch,
            "layout": stage.layout.degrees,
            "start": start,
            "evaluate_every": stage.evaluate_every,
        },
    )


def record_submission(stage: ResolvedStage, cluster: str) -> None:
    """Write what a job does not find on its node: the commit that it runs, and the cluster file.

    Jobs get the committed tree (`longhaul.jobs.git_tree`), so changes are not part of it.
    """
    hash_, _, _ = commit().partition(" ")
    file = path_of(cluster).absolute()
    write_json(stage.folder / SUBMITTED, {"commit": hash_, "cluster": str(file)})
    write_text(stage.folder / CLUSTER, file.read_text(encoding="utf-8"))


def _described_rotation(rope: RopeScaling) -> dict[str, Any]:
    """Return the rotation as a report shows it; LongRoPE's divisors are in the recipe."""
    content = {"method": rope.method, "base": rope.base, "factor": rope.factor} | rope.to_dict()
    for name in ("short_factor", "long_factor"):
        content.pop(name, None)
    if rope.before is not None:
        content["before"] = rope.before.method
    return {**content, "temperature": rope.temperature}
