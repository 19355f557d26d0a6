# SPDX-License-Identifier: Apache-2.0
"""Hold a resolved recipe to the laws, at build and again after the command line's overrides."""

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import fiddle as fdl
import nemo_run as run

from custom_modules.attention_kernels import KernelName
from custom_modules.context_parallel_attention import ignored_settings
from custom_modules.context_parallel_kind import TRANSFORMER_ENGINE_KINDS, Degrees, degrees
from recipes import laws
from recipes.stages import DocumentPolicy


def check(recipe: run.Partial) -> None:
    """Raise ValueError for a key that no target takes, and for numbers that break a law."""
    problems = [*phantom_keys(recipe), *without_effect(recipe), *disagreements(recipe)]
    if not problems:
        config = recipe.model.config
        for values in (config.rope, config.cp, recipe.optim.lr_scheduler):
            fdl.build(values)  # their own checks raise ValueError
        problems = list(broken_laws(recipe))
    if problems:
        raise ValueError("; ".join(problems))


def phantom_keys(node: Any, path: str = "") -> Iterator[str]:
    """Yield a sentence for each argument in the tree that its target does not name.

    fiddle refuses a misspelled keyword unless the target takes `**kwargs`; NeMo's
    `MegatronStrategy` does, so there a misspelled parallel size would build and do nothing.
    """
    if isinstance(node, fdl.Buildable):
        target = fdl.get_callable(node)
        known = named_parameters(target)
        for name, value in fdl.ordered_arguments(node, include_var_keyword=True).items():
            here = f"{path}.{name}" if path else str(name)
            if isinstance(name, str) and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                yield f"{here} is not a parameter of {target.__name__}{hint}"
            yield from phantom_keys(value, here)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from phantom_keys(value, f"{path}[{index}]")
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from phantom_keys(value, f"{path}[{key!r}]")


def named_parameters(target: Any) -> list[str]:
    """Return the parameters a function names, or a class and, through `**kwargs`, its bases."""
    if not inspect.isclass(target):
        return _named(inspect.signature(target).parameters.values())
    names: list[str] = []
    for owner in target.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        names += _named(parameters)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in names if name != "self"]


def _named(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def world_size(recipe: run.Partial) -> int:
    """Return the ranks that the trainer of the recipe starts."""
    ranks = 1
    for name in ("devices", "num_nodes"):
        value = getattr(recipe.trainer, name)
        if not isinstance(value, int):
            raise ValueError(f"trainer.{name} is {value!r}; a recipe states it as a number")
        ranks *= value
    return ranks


def tokens_per_batch(recipe: run.Partial) -> int:
    """Return the tokens of one optimizer step, from the data module."""
    return int(recipe.data.global_batch_size) * int(recipe.data.seq_length)


def without_effect(recipe: run.Partial) -> Iterator[str]:
    """Yield a sentence for each setting that NeMo would overwrite or that nothing here supports."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    for name in (
        "tensor_model_parallel_size",
        "context_parallel_size",
        "pipeline_model_parallel_size",
        "sequence_parallel",
    ):
        if name in fdl.ordered_arguments(config):
            yield f"model.config.{name} is overwritten by trainer.strategy.{name}; set that one"
    if recipe.data.documents not in get_args(DocumentPolicy):
        yield f"data.documents is {recipe.data.documents!r}; attention goes 'across' or 'within'"
    if config.attention_kernel not in get_args(KernelName):
        yield (
            f"model.config.attention_kernel is {config.attention_kernel!r}; it is one of "
            f"{', '.join(get_args(KernelName))}"
        )
    yield from (
        f"model.config.{sentence}"
        for sentence in ignored_settings(fdl.ordered_arguments(config, include_defaults=True))
    )
    for name in ("rotary_base", "rotary_percent", "scale_factor", "position_embedding_type"):
        if name in fdl.ordered_arguments(config):
            yield f"model.config.{name} has no effect; the rotation is model.config.rope"
    if config.recompute_granularity == "selective":
        yield (
            "model.config.recompute_granularity is 'selective'; long-context attention keeps no "
            "scores to recompute: take 'full' or null"
        )
    on_cpu = strategy.process_group_backend == "gloo"
    if config.attention_kernel != "auto":
        if (config.attention_kernel == "cpu_flash") != on_cpu:
            yield (
                f"model.config.attention_kernel is {config.attention_kernel}, which does not "
                f"compute on {'cpu' if on_cpu else 'cuda'}; take auto"
            )
        if config.cp.kind in TRANSFORMER_ENGINE_KINDS:
            yield (
                f"model.config.attention_kernel has no effect on model.config.cp.kind "
                f"{config.cp.kind}, which is Transformer Engine's; leave it at auto"
            )
    if "cp_comm_type" in fdl.ordered_arguments(config):
        yield "model.config.cp_comm_type has no effect; set model.config.cp.kind"
    if config.cp.kind in TRANSFORMER_ENGINE_KINDS and not config.transformer_engine:
        yield (
            f"model.config.cp.kind is {config.cp.kind}, which is Transformer Engine's, and this "
            "model runs without it; take ring, ulysses, head_chunked or hybrid"
        )
    if config.cp.kind in TRANSFORMER_ENGINE_KINDS and recipe.data.documents == "within":
        yield (
            f"model.config.cp.kind is {config.cp.kind}, which keeps documents apart only where "
            "they are padded; take ring, ulysses, head_chunked or hybrid, or data.documents=across"
        )
    if getattr(strategy, "virtual_pipeline_model_parallel_size", None):
        yield "trainer.strategy.virtual_pipeline_model_parallel_size is not supported; leave it out"
    if strategy.sequence_parallel != (strategy.tensor_model_parallel_size > 1):
        yield (
            f"trainer.strategy.sequence_parallel is {strategy.sequence_parallel} at tensor "
            f"parallel size {strategy.tensor_model_parallel_size}; it goes with tensor parallelism"
        )
    if strategy.process_group_backend == "nccl" and recipe.trainer.plugins.precision == "32":
        yield "trainer.plugins.precision is 32, which has no CUDA attention kernel; use bf16-mixed"
    if not any(hasattr(node, "tokens_per_batch") for node in recipe.trainer.callbacks):
        yield "trainer.callbacks has no StepLog, which asserts what each step consumes"


def disagreements(recipe: run.Partial) -> Iterator[str]:
    """Yield a sentence for each number that two places of the tree state differently."""
    logs = [node for node in recipe.trainer.callbacks if hasattr(node, "tokens_per_batch")]
    pairs = [
        ("model.config.seq_length", recipe.model.config.seq_length, recipe.data.seq_length),
        *(("the step log's seq_length", log.seq_length, recipe.data.seq_length) for log in logs),
        *(
            ("the step log's tokens_per_batch", log.tokens_per_batch, tokens_per_batch(recipe))
            for log in logs
        ),
    ]
    for name, stated, counted in pairs:
        if stated != counted:
            yield (
                f"{name} is {stated:,} but the data module gives {counted:,}; set both, or neither"
            )
    if recipe.trainer.strategy.ddp.average_in_collective:
        yield "ddp.average_in_collective must be False: gradients are sums over tokens"
    if not _calculates_per_token_loss(recipe.model.config):
        yield (
            "model.config.calculate_per_token_loss must be True: under context parallelism a "
            "rank with few valid tokens would weigh as much as a full one"
        )


def _calculates_per_token_loss(config: Any) -> bool:
    arguments = fdl.ordered_arguments(config, include_defaults=True)
    return bool(arguments["calculate_per_token_loss"])


def context_parallelism(recipe: run.Partial) -> Degrees:
    """Return the degrees of context parallelism that the recipe asks for, or `auto` chooses."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    tp = strategy.tensor_model_parallel_size
    return degrees(
        fdl.build(config.cp),
        size=strategy.context_parallel_size,
        heads=config.num_attention_heads // tp,
        kv_heads=config.num_query_groups // tp,
        head_dim=config.kv_channels,
        seq_length=recipe.data.seq_length,
        ranks_per_link=max(1, recipe.trainer.devices // tp),
    )


def broken_laws(recipe: run.Partial) -> Iterator[str]:
    """Yield the laws broken by the numbers that the resolved tree holds."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    yield from laws.broken(
        seq_length=recipe.data.seq_length,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        layers=config.num_layers,
        vocab=config.vocab_size,
        tp=strategy.tensor_model_parallel_size,
        cp=strategy.context_parallel_size,
        cp_kind=fdl.build(config.cp),
        pp=strategy.pipeline_model_parallel_size,
        world_size=world_size(recipe),
        ranks_per_node=recipe.trainer.devices,
        global_batch=recipe.data.global_batch_size,
        micro_batch=recipe.data.micro_batch_size,
    )
    if getattr(config, "fp8", None) and (chosen := context_parallelism(recipe)).heads_per_stage:
        yield (
            f"model.config.fp8 is {config.fp8!r} and {chosen}; head-chunked attention projects in "
            "the model's dtype: take ulysses, ring or hybrid"
        )
    yield from laws.broken_schedule(max_steps=recipe.trainer.max_steps, lr=recipe.optim.config.lr)
