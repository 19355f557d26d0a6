# SPDX-License-Identifier: Apache-2.0
"""Checks of `longhaul pretrain` and `longhaul run` on a recipe before it runs.

Everything here needs NeMo; the commands import it after they have shown that they are loading.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run
import torch
from fiddle.printing import as_dict_flattened

from custom_modules.attention.registry import kernel_for
from custom_modules.rope.config import RopeScaling
from data.files.nearest import near_path
from data.mixture.config import Mix
from data.mixture.groups import applies, groups, needs, often_repeated, without_shares
from data.mixture.stage_rows import StageRows, for_store, mix_of
from data.store import ONLY_SOURCE, Manifest, require_rows, require_tokenizer
from data.token_files.megatron_index import read_index
from eval.run_folder import BrokenResultError, StageRecord, stage_at
from longhaul.jobs.ladder_run import require_gpus
from recipes.checkpoints.files import HUGGING_FACE
from recipes.checkpoints.marker import (
    RECIPE,
    checkpoint_facts,
    newest_checkpoint,
    require_vocabulary,
    start_checkpoint,
)
from recipes.checkpoints.rotation import rotation_before
from recipes.checkpoints.stored import require_optimizer
from recipes.resolved import yaml_file
from recipes.resolved.overrides import require_same_rotary_dims
from recipes.resolved.read import context_parallelism
from recipes.resolved.stage import ResolvedStage
from recipes.shipped.row import Row
from recipes.spec import cluster
from recipes.spec.units import GiB

SHOWN, LONGEST = 3, 120
WITHOUT_EFFECT = frozenset({"model.config.deallocate_pipeline_outputs"})
"""Settings that a resumed stage may have otherwise: its numbers are the same."""
"""Changed settings that a message names, and characters of a value that it shows."""
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
    require_rows(manifest, rows)
    for folder in (stage.checkpoints, recipe.resume.start):
        found = None if folder is None else newest_checkpoint(Path(folder))
        facts = None if found is None else checkpoint_facts(found)
        if found is not None and facts is not None:
            require_vocabulary(found, rows)
            _require_tokenizer(manifest, facts, found)
            rotation_before(found)
            if "rope" in facts:
                turned = RopeScaling.from_dict(facts["rope"])
                require_same_rotary_dims(fdl.build(recipe.model.config.rope), turned, str(found))
    return manifest


def mix_notes(stage: ResolvedStage, manifest: Manifest) -> Iterator[str]:
    """Yield what the user should know of a stage's mix on a store, as a note or a warning.

    Raises MixError, a ValueError, for a mix that the store cannot have.
    """
    data = stage.recipe.data
    mix = _mix(stage, manifest)
    if mix is None:
        return
    if not applies(mix, manifest):
        yield f"note: {without_shares(manifest)}"
    taken = for_store(mix, manifest)
    found = groups(taken, manifest, data.seq_length)
    tokens = stage.recipe.trainer.max_steps * data.global_batch_size * data.seq_length
    for words in often_repeated(needs(taken, found, tokens)):
        yield f"warning: {words}"


def _mix(stage: ResolvedStage, manifest: Manifest) -> Mix | None:
    """Return the mix that a stage has on a store."""
    given = fdl.ordered_arguments(stage.recipe.data)
    if any(given.get(name) is not None for name in ("positions", "rope_scale", "sentences")):
        return None
    return mix_of(fdl.build(given["mix"]) if given.get("mix") is not None else None, manifest)


def require_sources(stage: ResolvedStage, named: set[str]) -> None:
    """Raise ValueError if the sources that a store is made of lack one that the mix takes."""
    stated = fdl.ordered_arguments(stage.recipe.data).get("mix")
    taken = set() if stated is None else {share.source for share in fdl.build(stated).shares}
    missing = sorted(taken - named)
    if missing and named != {ONLY_SOURCE}:
        raise ValueError(
            f"the mix of {stage.name} takes {', '.join(missing)}, which no --source names; those "
            f"named are {', '.join(sorted(named))}"
        )


def pack(stage: ResolvedStage, manifest: Manifest) -> None:
    """Pack the store for a stage with a mix, so that ranks do not wait for it."""
    recipe, mix = stage.recipe, _mix(stage, manifest)
    if mix is None:
        return
    indexes = [prefix.with_name(f"{prefix.name}.idx") for prefix in manifest.prefixes("train")]
    StageRows.of(
        manifest,
        mix,
        seq_length=recipe.data.seq_length,
        steps=recipe.trainer.max_steps,
        rows=recipe.data.global_batch_size,
        seed=fdl.ordered_arguments(recipe.data, include_defaults=True)["seed"],
        document_lengths=[read_index(index).lengths for index in indexes],
    )


def _require_tokenizer(manifest: Manifest, facts: dict[str, Any], checkpoint: Path) -> None:
    """Raise ValueError, with the tokenizer to prepare with, for a store of another tokenizer."""
    try:
        require_tokenizer(manifest, facts, of=f"the checkpoint {checkpoint} has")
    except ValueError as error:
        own = checkpoint / HUGGING_FACE
        named = shlex.quote(str(own)) if own.is_dir() else "FOLDER, the tokenizer of its store"
        raise ValueError(f"{error}; prepare a store with --tokenizer {named}") from None


def require_start(stage: ResolvedStage) -> None:
    """Raise ValueError if the stage starts from a checkpoint that is missing or incomplete."""
    start = stage.recipe.resume.start
    if start is not None and not newest_checkpoint(stage.checkpoints):
        try:
            found = start_checkpoint(Path(start))
            if stage.recipe.resume.optimizer == "carried":
                require_optimizer(found)
        except ValueError as error:
            raise ValueError(f"{stage.name} cannot start: {error}") from None


def not_there(stage: ResolvedStage) -> Iterator[tuple[str, str]]:
    """Yield the setting of a store, and of a start, that is not there, and a sentence on it."""
    store = Path(stage.recipe.data.store)
    if not store.exists():
        yield (
            "data.store",
            (
                f"there is no token store at {store}{near_path(store)}; make it with `longhaul "
                "prepare`, or name another by --store"
            ),
        )
    try:
        require_start(stage)
    except ValueError as error:
        yield "resume.start", str(error)


def require_same(stage: ResolvedStage) -> None:
    """Raise ValueError if the stage's folder holds checkpoints of another recipe.

    The same applies if the stage's record there cannot be read. Steps count too: Megatron shuffles
    the samples for the number of steps that a run will take.
    """
    folder, recipe = stage.folder, stage.recipe
    recorded(stage)
    saved = folder / RECIPE
    if newest_checkpoint(stage.checkpoints) is None or not saved.is_file():
        return
    before = yaml_file.read(saved)
    differing = list(_differing(before, recipe))
    if differing:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise ValueError(
            f"{folder} holds checkpoints of a recipe with another "
            f"{' and another '.join(differing[:SHOWN])}{more}; train with what it was, or into "
            "another run folder by --out, or remove this one"
        )


def recorded(stage: ResolvedStage) -> StageRecord | None:
    """Return the record in the stage's folder; raise ValueError if it cannot be read."""
    try:
        return stage_at(stage.folder)
    except BrokenResultError as error:
        raise ValueError(f"{error}; remove the file, and it is written again") from None


def _differing(before: nemo_run.Partial, now: nemo_run.Partial) -> Iterator[str]:
    """Yield each setting that a resumed stage has to keep and does not, with both values."""
    for part in ("model", "data", "optim"):
        old, new = getattr(before, part), getattr(now, part)
        if old == new:
            continue
        of_old, of_new = as_dict_flattened(old), as_dict_flattened(new)
        keys = [key for key in {**of_old, **of_new} if of_old.get(key) != of_new.get(key)]
        for key in keys:
            if f"{part}.{key}" not in WITHOUT_EFFECT:
                yield _changed(f"{part}.{key}", of_old.get(key), of_new.get(key))
        if not keys:
            yield part
    steps = before.trainer.max_steps, now.trainer.max_steps
    if steps[0] != steps[1]:
        yield _changed("trainer.max_steps", *steps)


def _changed(key: str, before: Any, now: Any) -> str:
    was, given = (str(value)[:LONGEST] for value in (before, now))
    return f"{key} (was {was}, is {given})"
