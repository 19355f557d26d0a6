# SPDX-License-Identifier: Apache-2.0
"""Checks of `longhaul pretrain` and `longhaul run` on a recipe before it runs.

Everything here needs NeMo; the commands import it after they have shown that they are loading.
"""

from collections.abc import Iterator
from pathlib import Path

import fiddle as fdl
import torch

from custom_modules.attention.registry import kernel_for
from custom_modules.rope.config import RopeScaling
from data.store import Manifest, require_tokenizer
from eval.run_folder import BrokenResultError, read_stage
from longhaul.jobs.ladder_run import require_gpus
from recipes.checkpoints.marker import (
    RECIPE,
    checkpoint_facts,
    newest_checkpoint,
    require_vocabulary,
    start_checkpoint,
)
from recipes.resolved import yaml_file
from recipes.resolved.overrides import require_same_rotary_dims
from recipes.resolved.read import context_parallelism
from recipes.resolved.stage import ResolvedStage
from recipes.shipped.row import Row
from recipes.spec import cluster
from recipes.spec.units import GiB

SMALLER = 0.97
"""Share of a planned GPU's memory below which a machine's GPU is another one."""


def summary(stage: ResolvedStage) -> str:
    """Return in words how ranks share a sequence, and why."""
    return f"context parallelism: {context_parallelism(stage.recipe)}"


def require_device(stage: ResolvedStage) -> None:
    """Raise ValueError where the recipe needs more GPUs, or another kernel, than are here."""
    layout, config = stage.layout, stage.recipe.model.config
    if layout.device == "cuda":
        engine = bool(config.transformer_engine)
        require_gpus(stage.name, stage.ranks_per_node, engine=engine)
    dtype = torch.float32 if layout.precision == "fp32" else torch.bfloat16
    kernel_for(
        torch.device(layout.device), dtype, config.kv_channels, config.attention_kernel,
        documents=stage.recipe.data.documents == "within",
    )  # fmt: skip


def fewer_ranks(stage: ResolvedStage, shipped: int) -> Iterator[str]:
    """Yield a sentence if a recipe for `shipped` GPUs runs on fewer, each of which holds more."""
    ranks = stage.layout.world_size
    if stage.layout.device == "cuda" and ranks < shipped:
        yield (
            f"{stage.name} is laid out for {shipped} GPUs and runs on {ranks}, each of which "
            "holds more; `longhaul doctor oom` says whether it fits"
        )


def smaller_gpu(stage: ResolvedStage, row: Row) -> Iterator[str]:
    """Yield a sentence if a GPU of this machine has less memory than the layout is planned for."""
    if stage.layout.device == "cpu" or not torch.cuda.is_available():
        return
    machine = cluster.load(row.cluster)
    found = torch.cuda.get_device_properties(0).total_memory
    if found < SMALLER * machine.gpu_bytes:
        yield (
            f"this machine's GPU has {found / GiB:.1f} GiB, and the layout is for the "
            f"{machine.gpu_bytes / GiB:.1f} GiB of {machine.name}; name a cluster file with its "
            "hardware by --cluster"
        )


def require_inputs(stage: ResolvedStage) -> Manifest:
    """Return the store's manifest; raise ValueError if store, vocabulary or start do not fit."""
    recipe = stage.recipe
    manifest = Manifest.load(recipe.data.store)
    rows = recipe.model.config.vocab_size
    if manifest.tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer of {recipe.data.store} has {manifest.tokenizer.vocab_size:,} tokens "
            f"and the model {rows:,} rows; prepare the store with the model's tokenizer"
        )
    for folder in (stage.checkpoints, recipe.resume.start):
        found = None if folder is None else newest_checkpoint(Path(folder))
        facts = None if found is None else checkpoint_facts(found)
        if found is not None and facts is not None:
            require_vocabulary(found, rows)
            require_tokenizer(manifest, facts["tokenizer"])
            if "rope" in facts:
                turned = RopeScaling.from_dict(facts["rope"])
                require_same_rotary_dims(fdl.build(recipe.model.config.rope), turned, str(found))
    return manifest


def require_start(stage: ResolvedStage) -> None:
    """Raise ValueError if the stage starts from a checkpoint that is missing or incomplete."""
    start = stage.recipe.resume.start
    if start is not None and not newest_checkpoint(stage.checkpoints):
        try:
            start_checkpoint(Path(start))
        except ValueError as error:
            raise ValueError(f"{stage.name} cannot start: {error}") from None


def require_same(stage: ResolvedStage) -> None:
    """Raise ValueError if the stage's folder holds checkpoints of another recipe.

    The same applies if the stage's record there cannot be read. Steps count too: Megatron shuffles
    the samples for the number of steps that a run will take.
    """
    folder, recipe = stage.folder, stage.recipe
    try:
        read_stage(folder.parents[1], folder.name)
    except BrokenResultError as error:
        raise ValueError(f"{error}; remove the file, and it is written again") from None
    saved = folder / RECIPE
    if newest_checkpoint(stage.checkpoints) is None or not saved.is_file():
        return
    before = yaml_file.read(saved)
    differing = [
        part
        for part in ("model", "data", "optim")
        if getattr(before, part) != getattr(recipe, part)
    ]
    if before.trainer.max_steps != stage.steps:
        differing.append("trainer.max_steps")
    if differing:
        raise ValueError(
            f"{folder} holds checkpoints of a recipe with another "
            f"{' and '.join(differing)}; remove it, or train into another run folder: `run` takes "
            "--out, `pretrain` writes below the working folder"
        )
