# SPDX-License-Identifier: Apache-2.0
"""Requirements of a chain's jobs on their machines, as nodes of the jobs' trees; imports NeMo."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import nemo_run

from custom_modules.context_parallel.config import ContextParallelKind
from longhaul.jobs import evaluation
from longhaul.jobs.ladder_run import LadderRun
from recipes.nemo2.settings import MEGATRON_FSDP
from recipes.resolved.stage import ResolvedStage
from recipes.spec.units import GiB
from slurm.cluster_file import ClusterFile
from slurm.preflight.requirements import Bandwidth, Expected, folder_at, inner_degree, thresholds

OF_A_GPU_NODE = ("linked_gpus", "gpu_memory_gib", "capability", "shared_memory_gib")


def of_training(plan: LadderRun, file: ClusterFile, stage: ResolvedStage) -> nemo_run.Config:
    """Return the requirements of a stage: its ranks, links, host memory, and room to write."""
    layout, per_node = stage.layout, stage.ranks_per_node
    expected = _expected(plan, nodes=stage.nodes, per_node=per_node)
    _set(
        expected,
        **_folders(file),
        **_speed(file),
        **_machine(file, stage, per_node),
        tp=layout.tp,
        cp=layout.cp.size,
        ulysses=inner_degree(stage.recipe.model.config.cp, layout.cp.size),
        megatron_fsdp=layout.sharding in MEGATRON_FSDP,
        host_bytes_per_rank=_host_bytes(stage),
        checkpoint_folder=_path(stage.checkpoints),
        store=_path(plan.store),
    )
    return expected


def of_evaluation(
    plan: LadderRun, file: ClusterFile, stage: ResolvedStage, *, nodes: int, per_node: int
) -> nemo_run.Config:
    """Return the requirements of an evaluation: no room for checkpoints, no pinned memory."""
    layout = evaluation.evaluation_layout(stage, plan.evaluation)
    # The kind of training was chosen for its own ranks.
    kind = ContextParallelKind() if plan.evaluation.asked else stage.recipe.model.config.cp
    expected = _expected(plan, nodes=nodes, per_node=per_node)
    _set(
        expected,
        **_speed(file),
        **_machine(file, stage, per_node),
        tp=layout["tensor_parallel"],
        cp=layout["context_parallel"],
        ulysses=inner_degree(kind, layout["context_parallel"]),
        store=_path(plan.store),
    )
    return expected


def of_one_rank(plan: LadderRun, *, with_store: bool) -> nemo_run.Config:
    """Return the requirements of a job of one rank without a GPU: its folders and the versions."""
    expected = nemo_run.Config(Expected, world_size=1, nodes=1, run_folder=_path(plan.run))
    if with_store:
        expected.store, expected.verify = _path(plan.store), _verify(plan)
    return expected


def _verify(plan: LadderRun) -> str:
    return {None: "sampled", True: "whole", False: "none"}[plan.verify]


def _expected(plan: LadderRun, *, nodes: int, per_node: int) -> nemo_run.Config:
    return nemo_run.Config(
        Expected,
        world_size=nodes * per_node,
        nodes=nodes,
        ranks_per_node=per_node,
        run_folder=_path(plan.run),
        verify=_verify(plan),
    )


def _set(expected: nemo_run.Config, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(expected, name, value)


def _folders(file: ClusterFile) -> dict[str, Any]:
    """Return the cluster file's thresholds for the file system of the checkpoints."""
    said = thresholds(file)
    return {name: said[name] for name in ("least_write_mbps", "free_gib")}


def _speed(file: ClusterFile) -> dict[str, Any]:
    """Return how much slower than the other ranks a rank may be."""
    said = thresholds(file)
    return {name: said[name] for name in ("slow_warned", "slow_failed")}


def _machine(file: ClusterFile, stage: ResolvedStage, per_node: int) -> dict[str, Any]:
    """Return the requirements on a node with GPUs; empty for CPU ranks."""
    if stage.layout.device == "cpu" or file.hardware is None:
        return {}
    machine, said = Expected.of(file.hardware), thresholds(file)
    found = {name: getattr(machine, name) for name in OF_A_GPU_NODE}
    found |= {name: said[name] for name in ("least_driver", "least_sm_clock_mhz", "hca")}
    if machine.bandwidth is not None:
        found["bandwidth"] = nemo_run.Config(Bandwidth, **asdict(machine.bandwidth))
    return {**found, "gpus_per_node": per_node}


def _host_bytes(stage: ResolvedStage) -> float:
    """Return the bytes that a rank pins: offload's cap or the plan's host memory, if larger.

    `cap_gib` covers only activations, and the plan, with the optimizer, ignores a raised cap.
    """
    offload = stage.layout.offload
    cap = offload.cap_gib * GiB if offload.tensors != "none" else 0.0
    return max(cap, 0.0 if stage.plan is None else stage.plan.memory.host)


def _path(folder: Path) -> nemo_run.Config:
    return nemo_run.Config(folder_at, path=str(folder.resolve()))
