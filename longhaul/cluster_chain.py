# SPDX-License-Identifier: Apache-2.0
"""A ladder as a scheduler's jobs: prepare, then train, evaluate and judge each stage, then export.

Every job is one that may be queued again under its own number: a stage goes on from its last
checkpoint, so that a time limit shorter than it, a preemption or a lost node costs steps and not
the chain. Imports NeMo.
"""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import nemo_run

from data.prepare import prepare
from eval.gate import evaluate_and_judge, has_passed
from longhaul import chain, stages
from longhaul.ladder_run import Plan
from recipes.check import trained_length
from recipes.hugging_face.exporting import export_stage
from recipes.pretrain import described
from recipes.units import GiB
from slurm.cluster_file import PLACEHOLDER, ClusterFile
from slurm.executors import executor, require_reached
from slurm.launch import Job
from slurm.preflight.expected import Bandwidth, Expected, inner_degree
from slurm.rank import run, train


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What a store is made of, where there is none yet."""

    source: str | None
    tokenizer: str | None
    vocab_size: int


def jobs(
    plan: Plan,
    made: Sequence[nemo_run.Partial],
    file: ClusterFile,
    *,
    documents: Documents | None,
    export: Path | None,
    evaluation_documents: int = chain.EVALUATION_DOCUMENTS,
    trials: int = chain.EVALUATION_TRIALS,
) -> list[Job]:
    """Return the jobs that are left to do, in order; a stage that is finished is not run again."""
    found: list[Job] = []
    if documents is not None:
        found.append(_prepare(plan, file, documents))
    lengths = sorted({trained_length(recipe) for recipe in made})
    for at, recipe in enumerate(made):
        if not chain.is_done(recipe):
            found.append(_train(plan, file, recipe))
        elif has_passed(plan.run, recipe.log.name):
            continue
        reached = [length for length in lengths if length <= trained_length(recipe)]
        before = made[at - 1].log.name if at else None
        task = nemo_run.Partial(
            evaluate_and_judge,
            run=str(plan.run.resolve()),
            stage=recipe.log.name,
            before=before,
            gate=described(plan.ladder.stages[at].gate),
            store=str(plan.store.resolve()),
            lengths=reached,
            documents=evaluation_documents,
            trials=trials,
            **_parallel(recipe),
        )
        found.append(_job(plan, file, f"evaluate_{recipe.log.name}", task, recipe))
    if export is not None:
        source = str(stages.folder_of(made[-1]).resolve())
        task = nemo_run.Partial(export_stage, source=source, to=str(export.resolve()))
        found.append(_job(plan, file, "export", task, None))
    return found


def require(plan: Plan, file: ClusterFile) -> list[str]:
    """Raise ValueError for what would fail on the cluster; return what is to be known.

    Jobs run the committed tree: nemo-run packs nothing else.
    """
    container, tunnel = file.container, file.tunnel
    if file.executor != "slurm":
        raise ValueError(
            f"cluster {file.name} has executor {file.executor}; a chain needs a scheduler that "
            "knows dependencies: slurm, or --executor local"
        )
    if container is not None and PLACEHOLDER in container.image:
        raise ValueError(
            f"cluster {file.name} names no container; set container.image in the file "
            "(docs/containers.md), or leave `container` out and set `python`"
        )
    here = container is not None and container.image.startswith("/") and tunnel.kind == "local"
    if container is not None and here and not Path(container.image).is_file():
        raise ValueError(f"there is no container at {container.image}; see docs/containers.md")
    folder = plan.run / "launch"  # what only the user knows, before a record is written
    executor(file, nodes=1, ranks_per_node=1, folder=folder, outcome=folder / "outcome")
    if tunnel.kind == "ssh":
        require_reached(file)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if dirty.returncode:
        raise ValueError("jobs get the git tree that they are submitted from, and this is none")
    if dirty.stdout.strip():
        changed = len(dirty.stdout.splitlines())
        return [f"{changed} changed files are not committed; jobs get the committed tree"]
    return []


def require_shared(plan: Plan, file: ClusterFile) -> None:
    """Raise ValueError where a cluster behind a tunnel does not see what was written here."""
    if file.tunnel.kind == "local":
        return
    record = plan.run.resolve() / "run.json"
    tunnel = executor(
        file, nodes=1, ranks_per_node=1, folder=plan.run / "launch", outcome=record
    ).tunnel
    tunnel.connect()
    if tunnel.run(f"test -e {shlex.quote(str(record))}", warn=True, hide=True).return_code:
        raise ValueError(
            f"{file.tunnel.host} does not see {record}; --out and --store have to be on a file "
            "system that this machine and the cluster share, at the same place"
        )


def _prepare(plan: Plan, file: ClusterFile, documents: Documents) -> Job:
    task = nemo_run.Partial(
        prepare,
        source=documents.source,
        out=str(plan.store.resolve()),
        tokenizer=documents.tokenizer,
        vocab_size=documents.vocab_size,
    )
    online = {**file.environment, "HF_HUB_OFFLINE": 0}  # documents and tokenizer may be its
    return _job(plan, file.model_copy(update={"environment": online}), "prepare", task, None)


def _train(plan: Plan, file: ClusterFile, recipe: nemo_run.Partial) -> Job:
    folder = stages.folder_of(recipe)
    task = nemo_run.Partial(
        train,
        config=str(folder / "config.yaml"),
        expected=_expected(plan, file, recipe),
        seconds=file.preflight_seconds,
    )
    made = executor(
        _with_gpus(file, recipe),
        nodes=int(recipe.trainer.num_nodes),
        ranks_per_node=int(recipe.trainer.devices),
        folder=plan.run / "launch",
        outcome=folder / "outcome",
    )
    return Job(recipe.log.name, task, made)


def _expected(plan: Plan, file: ClusterFile, recipe: nemo_run.Partial) -> nemo_run.Config:
    """Return what a stage expects of its machines, as a node of its job's tree."""
    strategy, offload = recipe.trainer.strategy, recipe.model.config.offload
    nodes, per_node = int(recipe.trainer.num_nodes), int(recipe.trainer.devices)
    cp = int(strategy.context_parallel_size)
    said: dict[str, Any] = {}
    if stages.device_of(recipe) == "cuda" and file.hardware is not None:
        machine = Expected.of(file.hardware)
        said = {
            name: getattr(machine, name)
            for name in ("linked_gpus", "gpu_memory_gib", "capability", "shared_memory_gib")
        }
        said["gpus_per_node"] = per_node
        said["hca"] = str(file.environment.get("NCCL_IB_HCA", ""))
        if machine.bandwidth is not None:
            said["bandwidth"] = nemo_run.Config(Bandwidth, **asdict(machine.bandwidth))
    return nemo_run.Config(
        Expected,
        world_size=nodes * per_node,
        nodes=nodes,
        ranks_per_node=per_node,
        tp=int(strategy.tensor_model_parallel_size),
        cp=cp,
        ulysses=inner_degree(recipe.model.config.cp, cp),
        megatron_fsdp=bool(strategy.ddp.use_megatron_fsdp),
        host_bytes_per_rank=offload.cap_gib * GiB if offload.tensors != "none" else 0,
        run_folder=nemo_run.Config(Path, str(plan.run.resolve())),
        store=nemo_run.Config(Path, str(plan.store.resolve())),
        **said,
    )


def _job(plan: Plan, file: ClusterFile, name: str, task: nemo_run.Partial, recipe: Any) -> Job:
    """Return a job around a task: on the ranks of a recipe's evaluation, or on one rank."""
    ranks = stages.evaluation_layout(recipe)["ranks"] if recipe is not None else 1
    per_node = ranks if recipe is None else min(ranks, int(recipe.trainer.devices))
    made = executor(
        _with_gpus(file, recipe),
        nodes=ceil(ranks / per_node),
        ranks_per_node=per_node,
        folder=plan.run / "launch",
        outcome=plan.run / "launch" / "outcomes" / name,
    )
    return Job(name, nemo_run.Partial(run, task=task), made)


def _parallel(recipe: nemo_run.Partial) -> dict[str, Any]:
    layout = stages.evaluation_layout(recipe)
    layout.pop("ranks")
    return layout


def _with_gpus(file: ClusterFile, recipe: Any) -> ClusterFile:
    """Return the file asking for no GPUs where the job's ranks are on the CPU."""
    if recipe is not None and stages.device_of(recipe) == "cuda":
        return file
    return file.model_copy(update={"slurm": file.slurm.model_copy(update={"ask_for_gpus": "none"})})
