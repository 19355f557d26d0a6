# SPDX-License-Identifier: Apache-2.0
"""Check that the values of a resolved recipe are present, of the right type and in range.

NeMo and Lightning check most of them only when training begins, on every rank, and some never:
checkpoints every 0 steps are no checkpoints.
"""

import inspect
import math
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import fiddle as fdl
import nemo_run as run

NEEDED = (
    "model.config.seq_length", "model.config.hidden_size", "model.config.ffn_hidden_size",
    "model.config.num_layers", "model.config.num_attention_heads", "model.config.num_query_groups",
    "model.config.kv_channels", "model.config.vocab_size", "model.config.rope", "model.config.cp",
    "model.config.recompute", "model.config.tiling", "model.config.offload",
    "model.config.attention_kernel", "model.config.transformer_engine",
    "data.store", "data.seq_length", "data.global_batch_size", "data.micro_batch_size",
    "data.documents", "optim.config.lr", "optim.config.use_distributed_optimizer",
    "optim.lr_scheduler", "trainer.devices", "trainer.num_nodes", "trainer.max_steps",
    "trainer.callbacks", "trainer.plugins.precision", "trainer.strategy.ddp.average_in_collective",
    "trainer.strategy.tensor_model_parallel_size", "trainer.strategy.context_parallel_size",
    "trainer.strategy.pipeline_model_parallel_size", "trainer.strategy.process_group_backend",
    "log.name", "log.explicit_log_dir", "log.ckpt.dirpath", "log.tensorboard.save_dir",
    "resume.resume_from_directory", "resume.start",
)  # fmt: skip
"""Fields that every recipe states; a truncated file lacks some."""
LONGEST = 2**31 - 1
"""Maximum of steps: a schedule counts them in 32 bits."""
PRECISIONS = ("bf16-mixed", "32")
TIME = re.compile(r"\d{1,4}:\d{2}:\d{2}:\d{2}")
WHOLE = (
    "trainer.max_steps", "data.seq_length", "data.global_batch_size", "data.micro_batch_size",
    "data.num_workers", "log.ckpt.every_n_train_steps", "model.config.seq_length",
    "model.config.num_layers", "model.config.hidden_size", "model.config.vocab_size",
    "trainer.strategy.tensor_model_parallel_size", "trainer.strategy.context_parallel_size",
    "trainer.strategy.pipeline_model_parallel_size",
    "trainer.strategy.virtual_pipeline_model_parallel_size",
    "trainer.strategy.expert_model_parallel_size", "trainer.strategy.expert_tensor_parallel_size",
)  # fmt: skip
AT_LEAST = {
    "log.ckpt.every_n_train_steps": 1,
    "data.num_workers": 0,
    "data.micro_batch_size": 1,
    "data.global_batch_size": 1,
    "data.seq_length": 1,
    "trainer.log_every_n_steps": 1,
    "trainer.limit_val_batches": 0,
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "optim.config.weight_decay": 0,
    "optim.config.clip_grad": 0,
    "optim.lr_scheduler.max_steps": 1,
}
_PLAIN = {int: "a number", float: "a number", bool: "true or false", str: "text"}


def missing(recipe: run.Partial) -> Iterator[str]:
    """Yield one sentence for each part that a recipe needs but does not have."""
    for path in NEEDED:
        node: Any = recipe
        for at, name in enumerate(path.split(".")):
            try:
                node = getattr(node, name)
            except (AttributeError, ValueError):  # raised by fiddle for a default made by a call
                where = ".".join(path.split(".")[: at + 1])
                yield f"the recipe has no {where}; `longhaul show NAME --to-yaml` writes all fields"
                return


def wrong_types(node: Any, path: str = "") -> Iterator[str]:
    """Yield one sentence for each value of a type that its field does not accept, and each NaN."""
    if isinstance(node, fdl.Buildable):
        annotations = _annotations(fdl.get_callable(node))
        for name, value in fdl.ordered_arguments(node, include_var_keyword=True).items():
            here = f"{path}.{name}" if path else str(name)
            if not _fits(value, annotations.get(str(name))):
                yield f"{here} is {value!r}; it is {_described(annotations[str(name)])}"
            else:
                yield from wrong_types(value, here)
    elif isinstance(node, list | tuple):
        for at, value in enumerate(node):
            yield from wrong_types(value, f"{path}[{at}]")
    elif isinstance(node, float) and not math.isfinite(node):
        yield f"{path} is {node}; it must be a finite number"


def _annotations(target: Any) -> dict[str, Any]:
    """Return the annotations of a target's parameters; for a class those of its first __init__."""
    if inspect.isclass(target):
        target = next(vars(one)["__init__"] for one in target.__mro__ if "__init__" in vars(one))
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {one.name: one.annotation for one in parameters}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types that an annotation admits: the members of a union, or itself."""
    union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if union else (annotation,)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the types of an annotation; empty if it has other than plain ones.

    The dataclass itself checks the values of a `Literal`.
    """
    kinds = alternatives(annotation)
    return kinds if all(one in (*_PLAIN, NoneType) for one in kinds) else ()


def _fits(value: Any, annotation: Any) -> bool:
    kinds = _kinds(annotation)
    if not kinds or value is None or isinstance(value, fdl.Buildable):
        return True  # None is what NeMo leaves unset, whatever its annotation says
    if isinstance(value, bool):
        return bool in kinds
    number = isinstance(value, int | float)
    if number and (int in kinds or float in kinds):
        return True  # NeMo annotates init_method_std, 0.02, as int
    return not number and isinstance(value, kinds)


def _described(annotation: Any) -> str:
    words = [_PLAIN[kind] for kind in _kinds(annotation) if kind in _PLAIN]
    return " or ".join(dict.fromkeys(words))


def out_of_range(recipe: run.Partial) -> Iterator[str]:
    """Yield one sentence for each setting of trainer, loader and checkpoints out of range."""
    for path in WHOLE:
        if isinstance(value := _stated(recipe, path), float):
            yield f"{path} is {value}; it must be a whole number"
    for path, least in AT_LEAST.items():
        value = _stated(recipe, path)
        if isinstance(value, int | float) and value < least:
            yield f"{path} is {value}; it must be at least {least}"
    steps = _stated(recipe, "trainer.max_steps")
    if isinstance(steps, int) and steps > LONGEST:
        yield f"trainer.max_steps is {steps}; it must be at most {LONGEST:,}"
    every = _stated(recipe, "trainer.val_check_interval")
    if isinstance(every, int | float) and not (every >= 1 if isinstance(every, int) else every > 0):
        yield f"trainer.val_check_interval is {every}; it must be a number of steps, at least 1"
    limit = _stated(recipe, "trainer.max_time")
    if isinstance(limit, str) and TIME.fullmatch(limit) is None:
        yield f"trainer.max_time is {limit!r}; it must be DD:HH:MM:SS, as 00:04:00:00"
    if _stated(recipe, "trainer.precision") is not None:
        yield "trainer.precision is overwritten by trainer.plugins.precision; set that one"
    precision = _stated(recipe, "trainer.plugins.precision")
    if precision not in PRECISIONS:
        yield f"trainer.plugins.precision is {precision!r}; it is one of {', '.join(PRECISIONS)}"
    for name in ("adam_beta1", "adam_beta2"):
        beta = _stated(recipe, f"optim.config.{name}")
        if isinstance(beta, int | float) and not 0 <= beta < 1:
            yield f"optim.config.{name} is {beta:g}; it must be at least 0 and below 1"


def _stated(recipe: run.Partial, path: str) -> Any:
    """Return the value at a path of the recipe, or None."""
    node: Any = recipe
    for name in path.split("."):
        if not isinstance(node, fdl.Buildable):
            return None
        node = fdl.ordered_arguments(node).get(name)
    return node
