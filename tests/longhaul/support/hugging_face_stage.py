# SPDX-License-Identifier: Apache-2.0
"""A stage that begins with an import, trained on forked ranks as `tests.runs.train` does."""

from pathlib import Path
from typing import Any


def recipe(options: dict[str, Any]):
    """Return the stage of `tests.recipes.hugging_face.support.stages` that these options name."""
    from custom_modules.rope.config import RopeScaling
    from recipes.hugging_face.config import card_of, read_config
    from recipes.spec.layout import ContextParallel
    from tests.recipes.hugging_face.support import stages

    start = Path(options["start"])
    sizes = dict(options["layout"])
    if "cp" in sizes:
        sizes["cp"] = ContextParallel.ring(sizes["cp"])
    made = stages.recipe(
        card_of(read_config(start / "hugging_face"), "imported"),
        RopeScaling.from_dict(options["rope"]),
        Path(options["run"]),
        start,
        **sizes,
    )
    made.data.store = options["store"]
    return made


def train_on_forked_rank(options: dict[str, Any], output: str) -> None:
    """Train it in the place of torchrun's rank."""
    from tests.runs import train

    train.recipe = recipe
    train.train_on_forked_rank(options, output)
