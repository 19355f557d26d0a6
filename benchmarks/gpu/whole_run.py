# SPDX-License-Identifier: Apache-2.0
"""A run through the command line that offloads, validates and saves while it trains.

What single steps leave out: the data loader's workers and the asynchronous checkpoint fork while
buffers are pinned, and the validation has no backward that frees what is away.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.gpu.sizes import Sizes, ladder_of
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.memory.pinned_pool import host_memory_left
from recipes.checkpoints.marker import newest_checkpoint
from recipes.nemo2.settings import place
from recipes.pretrain import pretrain
from recipes.resolved import read, yaml_file
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.units import GiB

STEPS, EVERY = 6, 3
"""Steps of the run, and after how many it validates and saves."""
VOCABULARY = 512
HOST_SHARE = 0.5
MOST_SECONDS = 900
LAST_LINES = 5


def run(sizes: Sizes) -> dict[str, Any]:
    """Return seconds by step, what was saved and validated; raise RuntimeError if the run fails."""
    card = replace(
        sizes.of_layers(sizes.layers[0]), vocab=VOCABULARY, config_class=None
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="a run ") as name:
        folder = Path(name)
        store = folder / "store"
        _longhaul("prepare", "--out", store, "--vocab-size", VOCABULARY)
        recipe = _recipe(sizes, card, folder / "run", store)
        yaml_file.write(recipe, folder / "recipe.yaml")
        said = _longhaul("pretrain", "--yaml", folder / "recipe.yaml", "--verbose")
        made = read.folder_of(recipe)
        steps = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
        newest, validated = newest_checkpoint(made / "checkpoints"), _validation_losses(made)
    if newest is None or len(steps) != STEPS:
        raise RuntimeError(
            f"{len(steps)} steps of {STEPS}, newest checkpoint {newest}: {said[-500:]}"
        )
    seconds = [step["seconds"] for step in steps]
    return {
        "tokens": sizes.run_length,
        "step_seconds": seconds,
        "usual_seconds": median([*seconds[1:EVERY], *seconds[EVERY + 1 :]]),
        "after_saving_seconds": seconds[EVERY],
        "validation_losses": validated,
        "checkpoint": newest.name,
    }


def _validation_losses(folder: Path) -> dict[int, float]:
    """Return the losses of the validations by step, as TensorBoard's file has them."""
    log = EventAccumulator(str(next(folder.rglob("events.out.tfevents.*"))))
    log.Reload()
    return {event.step: event.value for event in log.Scalars("val_loss")}


def _recipe(sizes: Sizes, card: ModelCard, folder: Path, store: Path) -> Any:
    length = sizes.run_length
    on_cpu: dict[str, Any] = {"device": "cpu", "precision": "fp32"} if sizes.device == "cpu" else {}
    layout = Layout(
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, loss_tile=sizes.loss_tile, mlp=True, mlp_tile=sizes.mlp_tile),
        offload=Offload(tensors="both", cap_gib=HOST_SHARE * host_memory_left() / GiB),
        **on_cpu,
    )
    ladder = ladder_of(length, steps=STEPS)
    recipe = pretrain(card, ladder, length, layout)
    place(recipe, card, ladder, ladder[length], run_to=folder, store=store)
    recipe.log.ckpt.every_n_train_steps = recipe.trainer.val_check_interval = EVERY
    recipe.trainer.limit_val_batches = 1
    read.absolute(recipe)
    return recipe


def _longhaul(*words: object) -> str:
    """Run a command; return what it said, or raise RuntimeError with its end."""
    command = [sys.executable, "-W", "ignore", "-m", "longhaul.cli", *map(str, words)]
    done = subprocess.run(
        command, env=os.environ | {"COLUMNS": "200"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=MOST_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"longhaul {words[0]} ended with {done.returncode}: {done.stdout[-2000:]}"
        )
    return done.stdout
