# SPDX-License-Identifier: Apache-2.0
"""A ladder as a scheduler's jobs: prepare, then train, evaluate and judge each stage, then export.

Suites and RULER's samples are jobs too: suites also on the model before the first stage, both on a
stage after its evaluation.

Every job may be requeued under its own number: a stage resumes from its last checkpoint, so that a
time limit shorter than the stage, a preemption or a lost node costs steps and not the chain. Each
job checks its machines first; links are measured only where a stage trains. Imports NeMo.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nemo_run

from eval.gates.gate import evaluate_and_judge, has_passed
from longhaul.jobs import evaluation, local_chain, node_requirements
from longhaul.jobs.chain_suites import ModelJob
from longhaul.jobs.job_times import save_seconds
from longhaul.jobs.ladder_run import LadderRun
from longhaul.jobs.origin import origin
from longhaul.jobs.store_source import Documents, plan_for, prepare_for, share_of
from longhaul.jobs.training import training_task
from recipes.hugging_face.export import export_stage
from recipes.nemo2.settings import as_config_node
from recipes.resolved.stage import ResolvedStage
from slurm.cluster_file import ClusterFile
from slurm.entrypoint import run
from slurm.executors import executor
from slurm.experiment import Job
from slurm.local_executor import of_debugged_ranks

EVALUATION_DOCUMENTS = 12


def jobs(
    plan: LadderRun,
    stages: Sequence[ResolvedStage],
    file: ClusterFile,
    *,
    documents: Documents | None,
    export: Path | None,
    evaluated: bool = True,
    scored: Sequence[ModelJob] = (),
    cache: Mapping[str, str] = MappingProxyType({}),
    evaluation_documents: int = EVALUATION_DOCUMENTS,
    trials: int = local_chain.EVALUATION_TRIALS,
) -> list[Job]:
    """Return the jobs that are left to do, in order; a stage that is finished is not run again.

    Without `evaluated` the stages are trained, and neither evaluated nor judged. `scored` are the
    jobs of suites and RULER that are left, and `cache` the variables by which they find data.
    """
    found: list[Job] = []
    before, after = _scored(plan, file, stages, scored, cache)
    if documents is not None:
        found += _prepare(plan, file, documents, local_chain.longest(stages))
    found += before
    lengths = sorted({stage.trained_length for stage in stages})
    for (name, of_ladder), stage in zip(plan.chosen, stages, strict=True):
        if not stage.is_done:
            found.append(_train(plan, file, stage))
        elif has_passed(plan.run, stage.name, of_ladder.gate.of_evaluation):
            found += after[stage.name]
            continue
        if not evaluated:
            continue
        reached = [length for length in lengths if length <= stage.trained_length]
        task = nemo_run.Partial(
            evaluate_and_judge,
            run=str(plan.run.resolve()),
            stage=stage.name,
            before=plan.before(name),
            gate=as_config_node(of_ladder.gate),
            store=str(plan.store.resolve()),
            lengths=reached,
            documents=evaluation_documents,
            trials=trials,
            verify=plan.verify is not False,
            **origin(),
            **_parallel(plan, stage),
        )
        found.append(_evaluate(plan, file, f"evaluate_{stage.name}", task, stage))
        found += after[stage.name]
    if export is not None:
        source = str(stages[-1].folder.resolve())
        task = nemo_run.Partial(
            export_stage,
            source=source,
            to=str(export.resolve()),
            verify=plan.verify is not False,
        )
        expected = node_requirements.of_one_rank(plan, with_store=True)
        found.append(_on_ranks(plan, _without_gpus(file), "export", task, expected))
    return found


def require_evaluations(plan: LadderRun, stages: Sequence[ResolvedStage]) -> None:
    """Raise ValueError if a stage cannot be evaluated under the layout that is asked for.

    An evaluation may have as many GPUs as the largest stage, which the cluster is known to have.
    """
    most = max(stage.layout.world_size for stage in stages)
    for stage in stages:
        evaluation.require_parallel(
            stage, plan.evaluation, stage.trained_length, most, "the stages train on"
        )


def _prepare(
    plan: LadderRun, file: ClusterFile, documents: Documents, length: int
) -> Iterator[Job]:
    """Yield the jobs that make the store: one, or a plan, an array, and the one that merges.

    The last one does what is left to do, so that it is the same job in both cases; it starts also
    after an array of which a job has failed.
    """
    given = {
        "source": documents.source,
        "out": str(plan.store.resolve()),
        "tokenizer": documents.tokenizer,
        "vocab_size": documents.vocab_size,
    }
    # Documents and tokenizer may be on the hub; the cluster file can set the nodes offline.
    online = {"HF_HUB_OFFLINE": 0, **file.environment}
    file = _without_gpus(file).model_copy(update={"environment": online})
    expected = node_requirements.of_one_rank(plan, with_store=False)
    if documents.jobs is not None:
        yield _on_ranks(plan, file, "prepare_plan", nemo_run.Partial(plan_for, **given), expected)
        share = nemo_run.Partial(share_of, out=given["out"], jobs=documents.jobs)
        # Its jobs would write one page of checks at a time; the plan's job has checked a machine.
        yield _on_ranks(plan, file, "prepare_parts", share, None, array=documents.jobs)
    task = nemo_run.Partial(prepare_for, length, **given)
    after_parts = documents.jobs is not None
    yield _on_ranks(plan, file, "prepare", task, expected, after_failure=after_parts)


def _train(plan: LadderRun, file: ClusterFile, stage: ResolvedStage) -> Job:
    task = training_task(
        stage,
        expected=node_requirements.of_training(plan, file, stage),
        seconds=file.preflight_seconds,
    )
    if stage.debug_comm:
        debug = of_debugged_ranks(stage.folder)
        file = file.model_copy(update={"environment": {**debug, **file.environment}})
    made = executor(
        _with_gpus(file, stage),
        nodes=stage.nodes,
        ranks_per_node=stage.ranks_per_node,
        folder=plan.run / "launch",
        outcome=stage.folder / "outcome",
        save_seconds=save_seconds(file, stage),
    )
    return Job(stage.name, task, made)


def _scored(
    plan: LadderRun,
    file: ClusterFile,
    stages: Sequence[ResolvedStage],
    scored: Sequence[ModelJob],
    cache: Mapping[str, str],
) -> tuple[list[Job], dict[str, list[Job]]]:
    """Return the jobs on models before the first stage, and those on each stage."""
    before: list[Job] = []
    after: dict[str, list[Job]] = {stage.name: [] for stage in stages}
    file = file.model_copy(update={"environment": {**cache, **file.environment}})
    for job in scored:
        after.get(job.model, before).append(_evaluate(plan, file, job.name, job.task, job.stage))
    return before, after


def _evaluate(
    plan: LadderRun, file: ClusterFile, name: str, task: nemo_run.Partial, stage: ResolvedStage
) -> Job:
    """Return a job that evaluates, on the ranks that the length of a stage needs."""
    ranks = evaluation.evaluation_layout(stage, plan.evaluation)["ranks"]
    nodes = -(-ranks // stage.ranks_per_node)
    while ranks % nodes:
        nodes += 1
    size = {"nodes": nodes, "per_node": ranks // nodes}
    expected = node_requirements.of_evaluation(plan, file, stage, **size)
    return _on_ranks(plan, _with_gpus(file, stage), name, task, expected, **size)


def _on_ranks(
    plan: LadderRun,
    file: ClusterFile,
    name: str,
    task: nemo_run.Partial,
    expected: nemo_run.Config | None,
    *,
    nodes: int = 1,
    per_node: int = 1,
    array: int | None = None,
    after_failure: bool = False,
) -> Job:
    """Return a job for a task that ends by itself: it gets no warning before its time limit."""
    made = executor(
        file,
        nodes=nodes,
        ranks_per_node=per_node,
        folder=plan.run / "launch",
        outcome=plan.run / "launch" / "outcomes" / name,
        save_seconds=0,
        array=array,
        after_failure=after_failure,
    )
    return Job(name, nemo_run.Partial(run, task=task, expected=expected, seconds=0.0), made)


def _parallel(plan: LadderRun, stage: ResolvedStage) -> dict[str, Any]:
    layout = evaluation.evaluation_layout(stage, plan.evaluation)
    layout.pop("ranks")
    return layout


def _with_gpus(file: ClusterFile, stage: ResolvedStage) -> ClusterFile:
    """Return the cluster file, asking for no GPUs if the ranks of a stage are on the CPU."""
    return file if stage.layout.device == "cuda" else _without_gpus(file)


def _without_gpus(file: ClusterFile) -> ClusterFile:
    """Return the cluster file, asking for no GPUs, nor for all memory of a node that jobs share."""
    slurm = file.slurm
    changed: dict[str, Any] = {"ask_for_gpus": "none"}
    if slurm.mem == "0" and not slurm.exclusive and slurm.ask_for_gpus != "none":
        changed["mem"] = None  # the site's default
    return file.model_copy(update={"slurm": slurm.model_copy(update=changed)})
