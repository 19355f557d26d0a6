# SPDX-License-Identifier: Apache-2.0
"""Overrides `KEY=VALUE` for the CLI that turn the recipe of one workload into that of another.

They set what `recipes.pretrain` would set, so that the result passes the recipe check.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from recipes.planner.workload import Workload
from recipes.spec import pipeline
from recipes.spec.layout import Fp8, Layout

STRATEGY, CONFIG, OPTIMIZER = "trainer.strategy", "model.config", "optim.config"
_FSDP = {"gradients": "optim_grads", "parameters": "optim_grads_params"}


def override_words(before: Workload, after: Workload) -> list[str]:
    """Return the overrides that turn the recipe of `before` into that of `after`."""
    one, other = before.layout, after.layout
    words = [*_ranks(before, after), *_length(before, after)]
    if other.micro_batch != one.micro_batch:
        words.append(f"data.micro_batch_size={other.micro_batch}")
    words += _changed(f"{CONFIG}.cp", one.cp.how, other.cp.how)
    words += _changed(f"{CONFIG}.recompute", one.recompute, other.recompute)
    words += _changed(f"{CONFIG}.tiling", one.tiling, other.tiling)
    words += _changed(f"{CONFIG}.offload", one.offload, other.offload)
    if other.sharding != one.sharding:
        words += _sharding(one.sharding, other.sharding)
    if other.optimizer_offload != one.optimizer_offload:
        words += _optimizer_offload(other.optimizer_offload)
    if other.fp8 != one.fp8:
        words += _fp8(one.fp8, other.fp8)
    return words


def _ranks(before: Workload, after: Workload) -> Iterator[str]:
    one, other = before.layout, after.layout
    sizes = (
        ("tensor_model_parallel_size", one.tp, other.tp),
        ("context_parallel_size", one.cp.size, other.cp.size),
        ("pipeline_model_parallel_size", one.pp, other.pp),
        ("virtual_pipeline_model_parallel_size", _chunks(one), _chunks(other)),
        ("expert_model_parallel_size", one.ep, other.ep),
        ("expert_tensor_parallel_size", one.etp, other.etp),
    )
    for name, was, now in sizes:
        if now != was:
            yield f"{STRATEGY}.{name}={'null' if now is None else now}"
    if (other.vpp > 1) != (one.vpp > 1):
        yield f"{CONFIG}.overlap_p2p_comm={_shown(other.vpp > 1)}"
        yield f"{CONFIG}.batch_p2p_comm={_shown(other.vpp == 1)}"
        yield f"{CONFIG}.deallocate_pipeline_outputs={_shown(other.vpp == 1)}"
    was, now = (
        pipeline.is_uneven(job.card.layers, job.layout.pp, job.layout.vpp)
        for job in (before, after)
    )
    if was != now:
        for end in ("embedding", "loss"):
            yield f"{STRATEGY}.account_for_{end}_in_pipeline_split={_shown(now)}"
    if (other.tp > 1) != (one.tp > 1):
        yield f"{STRATEGY}.sequence_parallel={_shown(other.tp > 1)}"
    was_devices, was_nodes = _machines(before)
    devices, nodes = _machines(after)
    if devices != was_devices:
        yield f"trainer.devices={devices}"
    if nodes != was_nodes:
        yield f"trainer.num_nodes={nodes}"


def _chunks(layout: Layout) -> int | None:
    """Return Megatron's number of chunks, which is None for a pipeline that is not interleaved."""
    return layout.vpp if layout.vpp > 1 else None


def _machines(workload: Workload) -> tuple[int, int]:
    """Return the GPUs of a node and the nodes."""
    devices = min(workload.layout.world_size, workload.gpus_per_node)
    return devices, workload.layout.world_size // devices


def _length(before: Workload, after: Workload) -> Iterator[str]:
    """Yield the overrides of the sequence length; the tokens per batch stay the same."""
    if after.seq_length == before.seq_length:
        return
    yield f"{CONFIG}.seq_length={after.seq_length}"
    yield f"data.seq_length={after.seq_length}"
    yield f"data.global_batch_size={after.tokens_per_batch // after.seq_length}"
    yield f"trainer.callbacks[0].seq_length={after.seq_length}"
    flops = float(after.card.flops_per_token(after.seq_length))
    yield f"trainer.callbacks[0].flops_per_token={flops:.1f}"


def _changed(where: str, one: Any, other: Any) -> Iterator[str]:
    """Yield overrides of the fields that differ."""
    for field in fields(one):
        was, now = getattr(one, field.name), getattr(other, field.name)
        if now != was:
            yield f"{where}.{field.name}={_shown(now)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sharding(before: str, after: str) -> Iterator[str]:
    ddp = f"{STRATEGY}.ddp"
    if (before == "none") != (after == "none"):
        distributed = _shown(after != "none")
        yield f"{ddp}.use_distributed_optimizer={distributed}"
        yield f"{ddp}.overlap_param_gather={distributed}"
        yield f"{OPTIMIZER}.use_distributed_optimizer={distributed}"
    if after in _FSDP:
        yield f"{STRATEGY}.fsdp=megatron"
        yield f"{ddp}.use_megatron_fsdp=true"
        yield f"{ddp}.data_parallel_sharding_strategy={_FSDP[after]}"
        yield f"{STRATEGY}.save_ckpt_format=fsdp_dtensor"
        yield f"{STRATEGY}.ckpt_async_save=false"
        yield f"{CONFIG}.gradient_accumulation_fusion=false"


def _optimizer_offload(fraction: float) -> Iterator[str]:
    on = _shown(fraction != 0)
    yield f"{OPTIMIZER}.optimizer_cpu_offload={on}"
    yield f"{OPTIMIZER}.optimizer_offload_fraction={fraction:.2g}"
    yield f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d={on}"
    yield f"{OPTIMIZER}.use_precision_aware_optimizer={on}"


def _fp8(one: Fp8, other: Fp8) -> Iterator[str]:
    plugin = "trainer.plugins"
    yield f"{plugin}.fp8={other.format}"
    yield f"{plugin}.fp8_recipe={other.recipe}"
    if replace(one, recipe=other.recipe) != other:
        ends = bool(other.bf16_first or other.bf16_last)
        yield f"{plugin}.first_last_layers_bf16={_shown(ends)}"
        yield f"{plugin}.num_layers_at_start_in_bf16={other.bf16_first}"
        yield f"{plugin}.num_layers_at_end_in_bf16={other.bf16_last}"
