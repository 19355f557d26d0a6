# SPDX-License-Identifier: Apache-2.0
"""Whether a workload can be trained on a cluster: constraints of its recipe before it is built.

`recipes.resolved.check` asks the same constraints of the resolved recipe.
"""

from collections.abc import Iterator
from dataclasses import replace

from custom_modules.memory.config import Offload
from recipes.constraints import fp8
from recipes.constraints import violations as constraints
from recipes.constraints.training_step import TrainingStep
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster

CUDA = (12, 9)
"""CUDA version assumed for FP8 recipes, since no device is queried: that of recent builds."""


def before_planning(workload: Workload, cluster: Cluster) -> str:
    """Return the first constraint that a workload violates with any host cap, or an empty string.

    A plan relies on these constraints, and then sets the cap that it needs.
    """
    bare = replace(workload, layout=replace(workload.layout, offload=Offload()))
    return next(violations(bare, cluster), "")


def violations(workload: Workload, cluster: Cluster) -> Iterator[str]:
    """Yield one sentence for each constraint that a workload violates on a cluster."""
    ranks = workload.layout.world_size
    ranks_per_node = min(ranks, cluster.gpus_per_node)
    if ranks % ranks_per_node:
        yield f"{ranks} ranks are not a whole number of nodes of {ranks_per_node}"
        return
    yield from constraints.violations(training_step(workload, ranks_per_node))
    device = fp8.refusal(workload.layout.fp8.recipe, cluster.gpu.capability, CUDA)
    if device is not None:
        yield device


def training_step(workload: Workload, ranks_per_node: int) -> TrainingStep:
    """Return the numbers that constraints are functions of."""
    layout, card = workload.layout, workload.card
    return TrainingStep(
        seq_length=workload.seq_length,
        heads=card.heads,
        kv_heads=card.kv_heads,
        head_dim=card.head_dim,
        hidden=card.hidden,
        ffn_hidden=card.ffn_hidden,
        layers=card.layers,
        pattern=card.pattern,
        wide_qk_norm=card.facts.wide_qk_norm,
        vocab=card.vocab,
        experts=card.experts if card.facts.experts else 0,
        ep=layout.ep,
        etp=layout.etp,
        tp=layout.tp,
        cp=layout.cp.size,
        cp_kind=layout.cp.how,
        pp=layout.pp,
        vpp=layout.vpp,
        world_size=layout.world_size,
        ranks_per_node=ranks_per_node,
        global_batch=workload.tokens_per_batch // workload.seq_length,
        micro_batch=layout.micro_batch,
        recompute=layout.recompute,
        tiling=layout.tiling,
        offload=layout.offload,
        sharding=layout.sharding,
        optimizer_offload=layout.optimizer_offload,
        fp8=layout.fp8,
        bf16=layout.precision == "bf16",
        on_cpu=layout.device == "cpu",
    )
