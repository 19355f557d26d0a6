# SPDX-License-Identifier: Apache-2.0
"""Check a resolved recipe against the constraints, at build and again after overrides."""

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import fiddle as fdl
import nemo_run as run

from custom_modules.memory.config import SavedTensors
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import Rotation
from recipes.constraints import laws
from recipes.constraints.train_short import broken_positions
from recipes.hugging_face.config import HF_DEFAULTS
from recipes.resolved.ineffective import without_effect
from recipes.resolved.read import (
    context_parallelism,
    fp8,
    rank_tokens,
    sharding_of,
    tokens_per_batch,
    trained_length,
    world_size,
)
from recipes.resolved.values import missing, out_of_range, wrong_types
from recipes.spec.families import FAMILIES


def check(recipe: run.Partial) -> None:
    """Raise ValueError for a key that no target accepts, and for violated constraints."""
    problems = [*missing(recipe)] or [*wrong_types(recipe)]
    problems = problems or [*without_effect(recipe), *disagreements(recipe), *out_of_range(recipe)]
    problems = [*phantom_keys(recipe), *problems]
    if not problems:
        config = recipe.model.config
        nouns = (config.rope, config.cp, config.recompute, config.tiling, config.offload)
        try:
            fdl.build([*nouns, recipe.optim.lr_scheduler])
        except ValueError as error:  # of the dataclass's own check; fiddle adds a paragraph
            raise ValueError(str(error).splitlines()[0]) from None
        fp8(recipe)
        problems = list(broken_laws(recipe))
    if problems:
        raise ValueError("; ".join(problems))


def notes(recipe: run.Partial) -> list[str]:
    """Return warnings about settings of a checked recipe, one sentence each."""
    tiling, tp = recipe.model.config.tiling, recipe.trainer.strategy.tensor_model_parallel_size
    rope = fdl.build(recipe.model.config.rope)
    return [
        *laws.clamped_tiles(fdl.build(tiling), tokens=rank_tokens(recipe), tp=tp),
        *laws.unstretched(rope, length=trained_length(recipe)),
        *_unexportable(recipe, rope),
    ]


def _unexportable(recipe: run.Partial, rope: RopeScaling) -> Iterator[str]:
    """Yield one sentence if the family's Hugging Face model does not support the rotation."""
    target = fdl.get_callable(recipe.model.config)
    for family in FAMILIES.values():
        ours = family.config_class == f"{target.__module__}.{target.__name__}"
        alone = rope.method in ("default", "ntk") and rope.before is None
        if ours and not HF_DEFAULTS[family.name].reads_scaling and not alone:
            yield (
                f"rope {rope.method} can be trained but not exported: {family.architecture} of "
                "transformers ignores rope_scaling; default and ntk can be exported"
            )


def phantom_keys(node: Any, path: str = "") -> Iterator[str]:
    """Yield one sentence for each argument in the tree that is not a parameter of its target.

    fiddle refuses a misspelled keyword unless the target takes `**kwargs`, as NeMo's
    `MegatronStrategy` does: a misspelled parallel size would be accepted and have no effect.
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
    """Return the parameter names of a function, or of a class and its bases via `**kwargs`."""
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


def disagreements(recipe: run.Partial) -> Iterator[str]:
    """Yield one sentence for each number that two places of the tree state differently."""
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


def broken_laws(recipe: run.Partial) -> Iterator[str]:
    """Yield one sentence for each constraint that the resolved tree violates."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    tp, pp = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size
    cp = strategy.context_parallel_size
    optim, data = recipe.optim.config, recipe.data
    of_shapes = list(
        laws.broken(
            seq_length=data.seq_length,
            heads=config.num_attention_heads,
            kv_heads=config.num_query_groups,
            head_dim=config.kv_channels,
            layers=config.num_layers,
            vocab=config.vocab_size,
            tp=tp,
            cp=cp,
            cp_kind=fdl.build(config.cp),
            pp=pp,
            world_size=world_size(recipe),
            ranks_per_node=recipe.trainer.devices,
            global_batch=data.global_batch_size,
            micro_batch=data.micro_batch_size,
        )
    )
    yield from of_shapes
    yield from laws.broken_schedule(max_steps=recipe.trainer.max_steps, lr=optim.lr)
    if of_shapes:
        return  # the checks below divide by them
    try:
        Rotation(fdl.build(config.rope), config.kv_channels)
    except ValueError as error:
        yield str(error)
    yield from laws.broken_rope(fdl.build(config.rope), documents=data.documents)
    given = fdl.ordered_arguments(data)
    skips, chosen, scale = (given.get(name) for name in ("positions", "sentences", "rope_scale"))
    yield from broken_positions(
        target_length=skips and skips.target_length,
        source_length=chosen and chosen.source_length,
        largest_scale=scale and scale.least * scale.scales,
        seq_length=data.seq_length,
        documents=data.documents,
        rope=fdl.build(config.rope),
    )
    bf16 = recipe.trainer.plugins.precision == "bf16-mixed"
    recompute, tiling = fdl.build(config.recompute), fdl.build(config.tiling)
    head_chunked = bool(context_parallelism(recipe).heads_per_stage)
    yield from laws.broken_sharding(
        sharding_of(recipe),
        pp=pp,
        optimizer_offload=optim.optimizer_offload_fraction,
        precision_aware=optim.use_precision_aware_optimizer,
        tiling=tiling,
        head_chunked=head_chunked,
    )
    dp = world_size(recipe) // (tp * cp * pp)
    yield from laws.broken_memory(
        recompute=recompute,
        tiling=tiling,
        offload=fdl.build(config.offload),
        cp_kind=config.cp.kind,
        head_chunked=head_chunked,
        saved=SavedTensors(
            tokens=rank_tokens(recipe),
            hidden=config.hidden_size,
            heads=config.num_attention_heads // tp,
            head_dim=config.kv_channels,
            tp=tp,
            element_bytes=2 if bf16 else 4,
        ),
        layers=config.num_layers,
        pp=pp,
        micro_batches=data.global_batch_size // (data.micro_batch_size * dp),
    )
    yield from laws.broken_fp8(
        fp8(recipe),
        on_cpu=strategy.process_group_backend == "gloo",
        bf16=bf16,
        transformer_engine=config.transformer_engine,
        head_chunked=head_chunked,
        tiling=tiling,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size // tp,
        qkv=(config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels // tp,
        tokens=rank_tokens(recipe) // tp,
        micro_batch=data.micro_batch_size,
        layers=config.num_layers,
        pp=pp,
    )
