# SPDX-License-Identifier: Apache-2.0
"""What `longhaul pretrain` and `longhaul run` do with a recipe before and while it runs.

Everything here needs NeMo; the commands import it after they have said that they are loading.
"""

import difflib
import inspect
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import fiddle as fdl
import nemo_run
import torch
from nemo_run.cli.cli_parser import CLIException, parse_cli_args

from custom_modules.attention.registry import kernel_for
from custom_modules.rope.config import RopeScaling
from data.store import Manifest, require_tokenizer
from eval.run_folder import (
    BrokenResultError,
    read_stage,
    write_json,
)
from recipes.checkpoints.marker import (
    checkpoint_facts,
    checkpoints_in,
    newest_checkpoint,
    start_checkpoint,
)
from recipes.nemo2.strategy import CpuStrategy
from recipes.notation.rope import rope_from
from recipes.pretrain import described as described_noun
from recipes.pretrain import on_cpu
from recipes.resolved import yaml_file
from recipes.resolved.check import (
    check,
    context_parallelism,
    tokens_per_batch,
    trained_length,
    world_size,
)
from recipes.resolved.values import alternatives
from recipes.shipped.factories import FACTORIES
from recipes.spec.naming import length_from
from recipes.spec.suggest import named
from slurm.entrypoint import train
from slurm.experiment import Job
from slurm.local_executor import local_executor

LENGTHS = (
    "seq_length", "original_length", "target_length", "source_length", "tokens_per_batch",
    "loss_tile", "mlp_tile",
)  # fmt: skip
"""Fields of a recipe that are counts of tokens, and may be written as lengths are."""
CONFIG = "config.yaml"
"""A stage's resolved recipe, in its folder; what its ranks read."""


def factory(name: str) -> nemo_run.Partial:
    """Return the recipe of that name; raise ValueError with the nearest name for an unknown one."""
    return named("recipe", name, FACTORIES)()


def override(recipe: nemo_run.Partial, words: Sequence[str]) -> nemo_run.Partial:
    """Return the recipe with nemo-run's `key=value` words applied, held to the laws again."""
    for word in words:
        if word.startswith("-") or "=" not in word:
            raise ValueError(
                f"{word!r} is not an override; expected KEY=VALUE, for example trainer.max_steps=20"
            )
    # nemo-run logs what it raises, the whole recipe with it; the sentence below is the answer.
    logging.getLogger("nemo_run.cli.cli_parser").setLevel(logging.CRITICAL)
    own = fdl.build(recipe.model.config.rope)
    words = [_in_tokens(word) for word in words]
    try:
        recipe = parse_cli_args(recipe, list(words))
    except (CLIException, AttributeError, TypeError, IndexError) as error:
        raise ValueError(_not_applied(recipe, words, error)) from error
    if str(recipe.trainer.devices).isdigit():  # nemo-run reads a number as text here
        recipe.trainer.devices = int(recipe.trainer.devices)
    _validate_within_the_stage(recipe, words)
    check(recipe)
    _require_rotation(recipe, own)
    return recipe


def _validate_within_the_stage(recipe: nemo_run.Partial, words: Sequence[str]) -> None:
    """Validate after the last step where overrides leave fewer than the recipe's interval.

    Lightning refuses an interval longer than the steps that the store's samples are drawn for.
    """
    trainer = recipe.trainer
    if any(word.startswith("trainer.val_check_interval") for word in words):
        return
    interval, steps = trainer.val_check_interval, trainer.max_steps
    if isinstance(interval, int) and isinstance(steps, int) and 0 < steps < interval:
        trainer.val_check_interval = steps


def _in_tokens(word: str) -> str:
    """Return an override with a length such as 8K as a number, which is what nemo-run reads."""
    key, _, value = word.partition("=")
    if key.rpartition(".")[2] in LENGTHS and re.fullmatch(r"[\d,]+[KM]|\d+(,\d{3})+", value, re.I):
        return f"{key}={length_from(value)}"
    return word


def _require_rotation(recipe: nemo_run.Partial, own: RopeScaling) -> None:
    """Raise ValueError where the recipe's rotation was changed into one that does not fit it."""
    chosen, context = fdl.build(recipe.model.config.rope), trained_length(recipe)
    if chosen == own:
        return
    _require_turning(chosen, own, "the recipe's own rotation")
    if (chosen.original_length or 0) > context:
        raise ValueError(
            f"the rotation's original_length is {chosen.original_length:,}, above the {context:,} "
            "tokens that the stage is for; write the context before extension"
        )


def _require_turning(chosen: RopeScaling, model: RopeScaling, what: str) -> None:
    """Raise ValueError where other dimensions of a head would turn than the model's do."""
    for name in ("partial_rotary_factor", "interleaved"):
        of_chosen, of_model = getattr(chosen, name), getattr(model, name)
        if of_chosen != of_model:
            raise ValueError(
                f"{name} of the rotation is {of_chosen} and that of {what} {of_model}; it is a "
                "fact of the model's weights, so leave it alone"
            )


def _not_applied(recipe: nemo_run.Partial, words: Sequence[str], error: Exception) -> str:
    """Return which word could not be applied, and the nearest key there is.

    Keys come first: the error shows the whole recipe, and so the values of words that it took.
    """
    for word in words:
        key = word.partition("=")[0]
        node: Any = recipe
        for part in key.rstrip("+-*/|&").split("."):
            known = [name for name in dir(node) if not name.startswith("_")]
            name = part.partition("[")[0]
            if isinstance(node, nemo_run.Config | nemo_run.Partial) and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {key.replace(name, near[0])}?" if near else ""
                return f"the recipe has no {key}{hint}"
            node = getattr(node, name, None)
    for word in words:
        key, _, value = word.partition("=")
        if repr(value)[1:-1] in str(error):
            node, takes = recipe, ""
            for part in key.rstrip("+-*/|&").split("."):
                takes = _takes(node, part)
                node = getattr(node, part.partition("[")[0], None)
            return f"{key} cannot be {value!r}: {_kind(node)}{takes}"
    return f"cannot apply {' '.join(words)}: {str(error).splitlines()[0][:200]}"


def _kind(value: Any) -> str:
    return f"it is {value!r} now, of type {type(value).__name__}"


def _takes(node: Any, name: str) -> str:
    """Return what the annotation of a recipe's field admits; empty where it does not say."""
    if not isinstance(node, nemo_run.Config | nemo_run.Partial):
        return ""
    # Not get_type_hints: NeMo's classes quote names that they import for type checkers alone.
    parameter = inspect.signature(node.__fn_or_cls__).parameters.get(name)
    annotation = parameter and parameter.annotation
    kinds = tuple(kind for kind in alternatives(annotation) if kind is not NoneType)
    if all(kind in (int, float) for kind in kinds):
        return "; it takes a number"
    if all(get_origin(kind) is Literal for kind in kinds):
        choices = [choice for kind in kinds for choice in get_args(kind)]
        return f"; it is one of {', '.join(map(str, choices))}"
    return ""


def with_rope(recipe: nemo_run.Partial, word: str) -> nemo_run.Partial:
    """Return the recipe with its heads turned by what `word` names (`recipes.notation.rope`).

    Fields that the word leaves out are those of the recipe's own rotation.
    """
    own = fdl.build(recipe.model.config.rope)
    kept = ("base", "partial_rotary_factor", "interleaved", "original_length")
    of_model = {name: getattr(own, name) for name in kept if name in own.stated()}
    recipe.model.config.rope = described_noun(rope_from(word, of_model, own=own))
    _require_rotation(recipe, own)
    return recipe


def on_device(recipe: nemo_run.Partial, device: str | None) -> None:
    """Put the recipe on the device asked for, and refuse one that this machine lacks."""
    laid_out_for = device_of(recipe)
    if device == "cpu" and laid_out_for == "cuda":
        on_cpu(recipe)
        check(recipe)
    elif device == "cuda" and laid_out_for == "cpu":
        raise ValueError(f"{recipe.log.name} is laid out for CPU ranks; it has no GPU layout")


def device_of(recipe: nemo_run.Partial) -> str:
    """Return `cpu` or `cuda`."""
    return "cpu" if issubclass(recipe.trainer.strategy.__fn_or_cls__, CpuStrategy) else "cuda"


def described(recipe: nemo_run.Partial) -> str:
    """Return in words how ranks share a sequence, and why."""
    return f"context parallelism: {context_parallelism(recipe)}"


def require_device(recipe: nemo_run.Partial) -> None:
    """Raise ValueError where the recipe needs more GPUs, or another kernel, than are here."""
    device = device_of(recipe)
    if device == "cuda":
        _require_gpus(recipe)
    config, fp32 = recipe.model.config, recipe.trainer.plugins.precision == "32"
    dtype = torch.float32 if fp32 else torch.bfloat16
    kernel_for(torch.device(device), dtype, config.kv_channels, config.attention_kernel)


def fewer_ranks(recipe: nemo_run.Partial, shipped: int) -> Iterator[str]:
    """Yield a sentence where a recipe for `shipped` GPUs was put on fewer, which hold more each."""
    ranks = world_size(recipe)
    if device_of(recipe) == "cuda" and ranks < shipped:
        yield (
            f"{recipe.log.name} is laid out for {shipped} GPUs and runs on {ranks}, each of which "
            "holds more; `longhaul doctor oom` says whether it fits"
        )


def _require_gpus(recipe: nemo_run.Partial) -> None:
    needed, found = int(recipe.trainer.devices), torch.cuda.device_count()
    if found < needed:
        raise ValueError(
            f"{recipe.log.name} needs {needed} CUDA GPUs on each node and this machine has "
            f"{found}; run it on a machine that has them, or on CPU ranks with --device cpu"
        )


def require_inputs(recipe: nemo_run.Partial) -> Manifest:
    """Return the store's manifest; raise ValueError where store, vocabulary or start do not fit."""
    manifest = Manifest.load(recipe.data.store)
    rows = recipe.model.config.vocab_size
    if manifest.tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer of {recipe.data.store} has {manifest.tokenizer.vocab_size:,} tokens "
            f"and the model {rows:,} rows; prepare the store with the model's tokenizer"
        )
    for folder in (recipe.resume.resume_from_directory, recipe.resume.start):
        found = None if folder is None else newest_checkpoint(Path(folder))
        facts = None if found is None else checkpoint_facts(found)
        if facts is not None:
            require_tokenizer(manifest, facts["tokenizer"])
            if "rope" in facts:
                turned = RopeScaling.from_dict(facts["rope"])
                _require_turning(fdl.build(recipe.model.config.rope), turned, str(found))
    return manifest


def require_start(recipe: nemo_run.Partial) -> None:
    """Raise ValueError where the stage starts from a checkpoint that is not there or not whole."""
    if recipe.resume.start is not None and not newest_checkpoint(
        Path(recipe.resume.resume_from_directory)
    ):
        try:
            start_checkpoint(Path(recipe.resume.start))
        except ValueError as error:
            raise ValueError(f"{recipe.log.name} cannot start: {error}") from None


def require_same(recipe: nemo_run.Partial) -> None:
    """Raise ValueError where the stage's folder holds checkpoints of another recipe.

    So it does where what the stage has recorded there cannot be read. Steps count too: Megatron
    shuffles the samples for the number that a run will take.
    """
    folder = folder_of(recipe)
    try:
        read_stage(folder.parents[1], folder.name)
    except BrokenResultError as error:
        raise ValueError(f"{error}; remove the file, and it is written again") from None
    saved = folder / CONFIG
    if newest_checkpoint(Path(recipe.resume.resume_from_directory)) is None or not saved.is_file():
        return
    before = yaml_file.read(saved)
    differing = [
        part
        for part in ("model", "data", "optim")
        if getattr(before, part) != getattr(recipe, part)
    ]
    if before.trainer.max_steps != recipe.trainer.max_steps:
        differing.append("trainer.max_steps")
    if differing:
        raise ValueError(
            f"{folder} holds checkpoints of a recipe with another "
            f"{' and '.join(differing)}; remove it, or train into another run folder: `run` takes "
            "--out, `pretrain` writes below the folder that it is typed in"
        )


def folder_of(recipe: nemo_run.Partial) -> Path:
    """Return the folder a stage writes to."""
    return Path(recipe.trainer.callbacks[0].path).parent


def absolute(recipe: nemo_run.Partial) -> None:
    """Make every path of the recipe absolute, since ranks may start in another folder."""
    recipe.data.store = os.path.abspath(recipe.data.store)
    for callback in recipe.trainer.callbacks:
        for name in {"path", "folder"} & set(callback.__arguments__):
            setattr(callback, name, os.path.abspath(getattr(callback, name)))
    recipe.log.explicit_log_dir = os.path.abspath(recipe.log.explicit_log_dir)
    recipe.log.ckpt.dirpath = os.path.abspath(recipe.log.ckpt.dirpath)
    recipe.log.tensorboard.save_dir = os.path.abspath(recipe.log.tensorboard.save_dir)
    recipe.resume.resume_from_directory = os.path.abspath(recipe.resume.resume_from_directory)
    if recipe.resume.start is not None:
        recipe.resume.start = str(checkpoints_in(Path(recipe.resume.start)).absolute())


def evaluation_layout(recipe: nemo_run.Partial) -> dict[str, Any]:
    """Return the ranks, kinds of parallelism and device to evaluate a stage with.

    On GPUs those that trained it, since its length needs them; on CPU two ranks that share the
    documents, which is faster than sharing each.
    """
    strategy = recipe.trainer.strategy
    on_gpu = device_of(recipe) == "cuda"
    tp = int(strategy.tensor_model_parallel_size) if on_gpu else 1
    cp = int(strategy.context_parallel_size) if on_gpu else 1
    ranks = tp * cp if on_gpu else min(2, os.cpu_count() or 1)
    return {
        "ranks": ranks,
        "tensor_parallel": tp,
        "context_parallel": cp,
        "device": device_of(recipe),
    }


def training_job(recipe: nemo_run.Partial) -> Job:
    """Return the job that trains the stage on this machine, once its recipe is recorded."""
    task = nemo_run.Partial(train, config=str(folder_of(recipe) / CONFIG))
    return Job(recipe.log.name, task, local_executor(world_size(recipe)))


def record(recipe: nemo_run.Partial, start: str) -> None:
    """Write the stage's resolved recipe and its facts into its folder."""
    folder, config, strategy = folder_of(recipe), recipe.model.config, recipe.trainer.strategy
    yaml_file.write(recipe, folder / CONFIG)
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
    """Return what a report says of a rotation; LongRoPE's divisors are in the recipe."""
    content = {"method": rope.method, "base": rope.base, "factor": rope.factor} | rope.to_dict()
    for name in ("short_factor", "long_factor"):
        content.pop(name, None)
    if rope.before is not None:
        content["before"] = rope.before.method
    return {**content, "temperature": rope.temperature}
