# SPDX-License-Identifier: Apache-2.0
"""The base model of a run: the weights that training started from, as evaluations compare them.

    base                  with the rotation that the weights came with
    base_with_yarn_x2     with the rotation of a stage, untrained

The second tells what the rotation alone does for the longer context; the difference from it to the
stage is what training adds. Rotations of several stages that are equal are evaluated once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fiddle as fdl

from custom_modules.rope.config import RopeScaling
from eval.run_folder import BASE
from recipes.checkpoints.marker import RECIPE, checkpoint_facts, start_checkpoint
from recipes.resolved import yaml_file
from recipes.spec.naming import length_word, stage_folder


@dataclass(frozen=True)
class BaseModel:
    """The base model with one rotation."""

    name: str
    checkpoint: Path
    stage: Path
    """Folder of a stage, whose recipe has the shape of the model."""
    rope: RopeScaling
    context: int
    """Context in tokens that the weights were trained for."""
    stages: tuple[str, ...] = ()
    """Stages that have this rotation; empty for the weights' own."""


def base_models(run: Path, stages: Sequence[str]) -> list[BaseModel]:
    """Return the base model of stages in order: with its own rotation, then with each of theirs.

    The base model is what the first of them started from. Raises ValueError if that is random
    weights, is not there any more, or does not state its rotation.
    """
    first = stage_folder(run, stages[0])
    start = yaml_file.read(first / RECIPE).resume.start
    if start is None:
        raise ValueError(
            f"{stages[0]} started from random weights, so {run} has no base model to evaluate; "
            "leave out --base"
        )
    checkpoint, facts = stated_rotation(
        start, "the base model cannot be evaluated", ", or leave out --base"
    )
    own, context = RopeScaling.from_dict(facts["rope"]), int(facts["seq_length"])
    models = [BaseModel(BASE, checkpoint, first, own, context)]
    for stage in stages:
        folder = stage_folder(run, stage)
        config = yaml_file.read(folder / RECIPE).model.config
        rope = fdl.build(config.rope)
        same = [at for at, model in enumerate(models) if model.rope == rope]
        if same:
            model = models[same[0]]
            if model.stages:
                models[same[0]] = replace(model, stages=(*model.stages, stage))
            continue
        name = f"{BASE}_with_{rope_word(rope)}"
        if any(model.name == name for model in models):
            name = f"{name}_of_{length_word(config.seq_length)}"
        models.append(BaseModel(name, checkpoint, folder, rope, context, (stage,)))
    return models


def stated_rotation(start: str, without: str, otherwise: str = "") -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that a stage starts from, and its facts with its rotation.

    Raises ValueError if it states none, with what is impossible `without` it and what to do.
    """
    checkpoint = start_checkpoint(Path(start))
    facts = checkpoint_facts(checkpoint)
    if facts is None or "rope" not in facts:
        raise ValueError(
            f"{checkpoint} does not state its rotation, so {without}; import the weights with "
            f"`longhaul import`{otherwise}"
        )
    return checkpoint, facts


def rope_word(rope: RopeScaling) -> str:
    """Return a rotation in a word, for the name of a file: yarn_x2, rope_base_8e6."""
    if rope.method == "default":
        return f"rope_base_{rope.base:g}".replace("+", "")
    return f"{rope.method}_x{rope.factor:g}"
