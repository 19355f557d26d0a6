# SPDX-License-Identifier: Apache-2.0
"""Check a resolved recipe against the constraints, at build and again after overrides."""

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import fiddle as fdl
import nemo_run as run

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import Rotation
from recipes.constraints import memory, rope, schedule, shapes, train_short
from recipes.constraints import violations as constraints
from recipes.constraints.training_step import TrainingStep
from recipes.hugging_face.family_defaults import HF_DEFAULTS
from recipes.resolved.ineffective import without_effect
from recipes.resolved.read import (
    fp8,
    pattern_of,
    rank_tokens,
    sharding_of,
    tokens_per_batch,
    trained_length,
    wide_qk_norm,
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
        nouns = [config.rope, config.cp, config.recompute, config.tiling, config.offload]
        if (pattern := fdl.ordered_arguments(config).get("pattern")) is not None:
            nouns.append(pattern)
        try:
            fdl.build([*nouns, recipe.optim.lr_scheduler])
        except ValueError as error:  # of the dataclass's own check; fiddle adds a paragraph
            raise ValueError(str(error).splitlines()[0]) from None
        fp8(recipe)
        problems = list(violations(recipe))
    if problems:
        raise ValueError("; ".join(problems))


def notes(recipe: run.Partial) -> list[str]:
    """Return warnings about settings of a checked recipe, one sentence each."""
    tiling, tp = recipe.model.config.tiling, recipe.trainer.strategy.tensor_model_parallel_size
    rotation = fdl.build(recipe.model.config.rope)
    return [
        *memory.clamped_tiles(fdl.build(tiling), tokens=rank_tokens(recipe), tp=tp),
        *rope.unstretched(rotation, length=trained_length(recipe)),
        *_unexportable(recipe, rotation),
    ]


def _unexportable(recipe: run.Partial, rotation: RopeScaling) -> Iterator[str]:
    """Yield one sentence if the family's Hugging Face model does not support the rotation."""
    target = fdl.get_callable(recipe.model.config)
    for family in FAMILIES.values():
        ours = family.config_class == f"{target.__module__}.{target.__name__}"
        alone = rotation.method in ("default", "ntk") and rotation.before is None
        if ours and not HF_DEFAULTS[family.name].reads_scaling and not alone:
            yield (
                f"rope {rotation.method} can be trained but not exported: {family.architecture} of "
                "transformers ignores rope_scaling; default and ntk can be exported"
            )
        own = pattern_of(recipe) if ours else None
        local = None if own is None else own.local_rope
        if local is not None and local.method != "default":
            yield (
                f"a rotation of local layers by {local.method} can be trained but not exported: "
                f"{family.architecture} of transformers 4 rotates them by a base alone"
            )
        elif (
            family.name == "olmo3"
            and local is not None
            and (rotation.method == "ntk" or rotation.base != local.base)
        ):
            yield (
                f"rope {rotation.method} with base {rotation.base:,} can be trained but not "
                f"exported: {family.architecture} of transformers 4 has one base for all layers, "
                f"and that of local layers is {local.base:,}; yarn at that base can be exported"
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
    pattern = fdl.ordered_arguments(recipe.model.config).get("pattern")
    window = None if pattern is None else fdl.ordered_arguments(pattern).get("window")
    read = fdl.ordered_arguments(recipe.data, include_defaults=True).get("window")
    if window != read:
        yield (
            f"model.config.pattern.window is {window}, but the data module counts pairs and the "
            f"step log FLOPs for {read}; state another window in a model card of your own"
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


def violations(recipe: run.Partial) -> Iterator[str]:
    """Yield one sentence for each constraint that the resolved recipe violates."""
    config, data = recipe.model.config, recipe.data
    step = training_step(recipe)
    yield from schedule.violations(max_steps=recipe.trainer.max_steps, lr=recipe.optim.config.lr)
    of_step = list(constraints.violations(step))
    if not any(shapes.violations(step)):
        try:
            Rotation(fdl.build(config.rope), config.kv_channels)
        except ValueError as error:
            yield str(error)
        yield from rope.violations(fdl.build(config.rope), documents=data.documents)
        yield from _of_train_short(recipe)
        yield from _of_mix(recipe)
    yield from of_step


def _of_mix(recipe: run.Partial) -> Iterator[str]:
    """Yield what the mix cannot have with the data module's other settings."""
    data = recipe.data
    given = fdl.ordered_arguments(data)
    if given.get("mix") is None:
        return
    try:
        mix = fdl.build(data.mix)
        mix.lengths(data.seq_length)
    except ValueError as error:
        yield f"data.mix: {error}"
        return
    if any(given.get(name) is not None for name in ("positions", "rope_scale", "sentences")):
        yield "data.mix and drawn positions exclude each other; set one of them to null"
    if mix.other_lengths and data.documents != "within":
        yield "data.mix has steps of other lengths, which need data.documents=within"


def _of_train_short(recipe: run.Partial) -> Iterator[str]:
    data, given = recipe.data, fdl.ordered_arguments(recipe.data)
    skips, chosen, scale = (given.get(name) for name in ("positions", "sentences", "rope_scale"))
    yield from train_short.violations(
        target_length=skips and skips.target_length,
        source_length=chosen and chosen.source_length,
        largest_scale=scale and scale.least * scale.scales,
        seq_length=data.seq_length,
        documents=data.documents,
        rope=fdl.build(recipe.model.config.rope),
    )


def training_step(recipe: run.Partial) -> TrainingStep:
    """Return the numbers of a resolved recipe that constraints are functions of."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    optim, data = recipe.optim.config, recipe.data
    return TrainingStep(
        seq_length=data.seq_length,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        hidden=config.hidden_size,
        ffn_hidden=config.ffn_hidden_size,
        layers=config.num_layers,
        pattern=pattern_of(recipe),
        wide_qk_norm=wide_qk_norm(recipe),
        vocab=config.vocab_size,
        experts=config.num_moe_experts or 0,
        ep=strategy.expert_model_parallel_size,
        etp=strategy.expert_tensor_parallel_size,
        tp=strategy.tensor_model_parallel_size,
        cp=strategy.context_parallel_size,
        cp_kind=fdl.build(config.cp),
        pp=strategy.pipeline_model_parallel_size,
        vpp=strategy.virtual_pipeline_model_parallel_size or 1,
        ends_count=strategy.account_for_loss_in_pipeline_split,
        world_size=world_size(recipe),
        ranks_per_node=recipe.trainer.devices,
        global_batch=data.global_batch_size,
        micro_batch=data.micro_batch_size,
        recompute=fdl.build(config.recompute),
        tiling=fdl.build(config.tiling),
        offload=fdl.build(config.offload),
        sharding=sharding_of(recipe),
        optimizer_offload=optim.optimizer_offload_fraction,
        precision_aware=optim.use_precision_aware_optimizer,
        fp8=fp8(recipe),
        bf16=recipe.trainer.plugins.precision == "bf16-mixed",
        on_cpu=strategy.process_group_backend == "gloo",
        transformer_engine=config.transformer_engine,
    )
