# SPDX-License-Identifier: Apache-2.0
"""Recipes of a stage that begins with an import, and the folder such a stage would leave."""

import json
import shutil
from pathlib import Path

from custom_modules.rope.config import RopeScaling
from recipes.checkpoints.marker import write_marker
from recipes.spec.model_card import ModelCard

LENGTH = 512


def recipe(card: ModelCard, rope: RopeScaling, run: Path, start: Path, **sizes):
    """Return a stage of 5 steps of 2 sequences of 512 tokens on CPU in fp32."""
    from recipes.nemo2.settings import place
    from recipes.pretrain import pretrain
    from recipes.spec.layout import Layout
    from recipes.spec.stage import Cosine, Ladder, Stage

    stage = Stage(
        seq_length=LENGTH,
        rope=rope,
        tokens=10 * LENGTH,
        tokens_per_batch=2 * LENGTH,
        lr=Cosine(peak=1e-3),
        start="card",
    )
    ladder = Ladder(name="longer", source="a test", stages=(stage,))
    made = pretrain(card, ladder, LENGTH, Layout(**{"precision": "fp32", "device": "cpu", **sizes}))
    place(made, card, ladder, stage, run_to=run, store=run / "store")
    made.resume.start = str(start)
    made.trainer.val_check_interval = 5
    return made


def untrained(imported: Path, card: ModelCard, rope: RopeScaling, run: Path) -> Path:
    """Return the folder of a stage that began with an import and learned nothing."""
    from recipes.resolved import yaml_file

    made = recipe(card, rope, run, imported)
    checkpoint = Path(made.log.ckpt.dirpath) / "step=5"
    shutil.copytree(imported / "weights", checkpoint / "weights")
    marker = json.loads((imported / "longhaul.json").read_text())
    rotation = {"rope": rope.to_dict(), "temperature": rope.temperature}
    marker |= {"step": 5, "max_steps": 5, "seq_length": LENGTH, **rotation}
    write_marker(checkpoint, marker)
    folder = checkpoint.parents[1]
    yaml_file.write(made, folder / "config.yaml")
    return folder
