# SPDX-License-Identifier: Apache-2.0
"""Constraints of sharded parameters, gradients and optimizer, and of an offloaded optimizer."""

from collections.abc import Iterator

from custom_modules.gpt.vocabulary import padded_vocabulary
from recipes.constraints.training_step import TrainingStep


def violations(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint of sharding and optimizer offload."""
    sharding, optimizer_offload = step.sharding, step.optimizer_offload
    fsdp = sharding in ("gradients", "parameters")
    if fsdp and step.tiling.loss:
        yield (
            f"sharding {sharding} with tiling loss, which reads the LM head's weight without "
            "calling the module that Megatron FSDP gathers it for; take sharding optimizer"
        )
    if sharding == "gradients" and step.tiling.mlp:
        yield (
            "sharding gradients with tiling mlp: Megatron FSDP would reduce the MLP's gradients "
            "after its first tile; take sharding optimizer or parameters"
        )
    if sharding == "gradients" and step.head_chunked:
        yield (
            "sharding gradients with head-chunked attention, which reads the QKV projection's "
            "weight without calling it; take sharding optimizer or parameters, or ulysses"
        )
    if fsdp and padded_vocabulary(step.vocab, step.tp) != step.vocab:
        yield (
            f"sharding {sharding} with a vocabulary of {step.vocab:,}, which TP {step.tp} does not "
            "divide: Megatron FSDP loads no checkpoint whose vocabulary is padded otherwise; take "
            "sharding optimizer, or another TP"
        )
    if fsdp and step.pp > 1:
        yield (
            f"sharding {sharding} uses Megatron FSDP, which lays ranks out as DP x TP, but PP is "
            f"{step.pp}; take PP 1, or sharding optimizer"
        )
    if fsdp and (step.ep > 1 or step.expert_tp != step.tp):
        yield (
            f"sharding {sharding} with EP {step.ep} and ETP {step.expert_tp}: Megatron FSDP shards "
            "all weights over the same ranks; take sharding optimizer, or leave EP and ETP out"
        )
    if not 0 <= optimizer_offload <= 1:
        yield f"optimizer_offload is {optimizer_offload:g}; it is a fraction, 0 to 1"
    elif optimizer_offload and sharding != "optimizer":
        yield (
            f"optimizer_offload is {optimizer_offload:g} with sharding {sharding}; Megatron-Core "
            "offloads only shards of its distributed optimizer: take sharding optimizer"
        )
    elif optimizer_offload and not step.precision_aware:
        yield (
            f"optimizer_offload is {optimizer_offload:g} without use_precision_aware_optimizer, "
            "which it needs to receive gradients; set that too"
        )
