# SPDX-License-Identifier: Apache-2.0
"""The suites of a ladder in a chain, here or on Slurm: checks before training, and their jobs.

Imports NeMo; lm-evaluation-harness only for a ladder that runs suites.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nemo_run

from data.store import Manifest
from data.tokenization.tokenizer import load
from eval.base_model import stated_rotation
from eval.harness.tasks import SuiteTask, built, find, require_harness
from eval.run_folder import BASE
from longhaul.jobs import evaluation
from longhaul.jobs.ladder_run import LadderRun
from recipes.checkpoints.marker import RECIPE, newest_checkpoint
from recipes.nemo2.settings import as_config_node
from recipes.resolved.stage import ResolvedStage
from recipes.spec.gate import SuiteThreshold
from recipes.spec.naming import stage_folder
from recipes.spec.stage import Ladder
from recipes.spec.suites import SuiteRun
from slurm.experiment import Job
from slurm.local_executor import local_executor

if TYPE_CHECKING:
    from eval.gates.chain_suites import Found


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """A job of a chain that scores one of its models, on the layout of a stage's evaluation."""

    name: str
    model: str
    stage: ResolvedStage
    task: nemo_run.Partial


def suites_of(ladder: Ladder) -> list[SuiteRun]:
    """Return the suites of a ladder; those without lengths get the contexts of its stages."""
    contexts = tuple(sorted({stage.target_length for stage in ladder.stages}))
    return [suite if suite.lengths else replace(suite, lengths=contexts) for suite in ladder.suites]


def require_suites(
    plan: LadderRun, stages: Sequence[ResolvedStage], tokenizer: str | None = None
) -> None:
    """Raise ValueError for what would fail after training: harness, tasks, data or thresholds.

    The data of tasks are loaded once, so that they are in the cache of ranks, which do not
    download. `tokenizer` is that of a store which the chain will make, a folder or a name of the
    hub; None if it trains one.
    """
    if not plan.ladder.suites:
        return
    require_harness()
    context = _base_context(plan, stages[0])
    if plan.store.exists():
        tokenizer = str(Manifest.load(plan.store).tokenizer_path)
    folder = None if tokenizer is None else Path(load(tokenizer).hugging_face.name_or_path)
    known: dict[str, tuple[SuiteRun, bool]] = {}
    for number, suite in enumerate(suites_of(plan.ladder)):
        try:
            found = _of_suite(suite, folder)
        except ValueError as error:
            raise ValueError(f"ladder {plan.ladder.name}: suites[{number}]: {error}") from None
        for name, makes_prompts in found.items():
            if name in known:
                raise ValueError(
                    f"ladder {plan.ladder.name} runs {name} twice, by suites[{number}] and by one "
                    "before it; name it once"
                )
            known[name] = suite, makes_prompts
    for name, stage in plan.chosen:
        for threshold in stage.gate.suites:
            reason = _refused(threshold, known)
            at_base = threshold.drop is not None and plan.before(name) is None
            if not reason and at_base and (threshold.length or 0) > context:
                reason = f"is for a drop from the base model, which reads {context:,} tokens"
            if reason:
                raise ValueError(f"the gate of {name}: {threshold.named} {reason}")


def local_jobs(plan: LadderRun, jobs: Sequence[ModelJob]) -> list[tuple[str, Job]]:
    """Return jobs on this machine, each with the model that it runs on."""
    found = []
    for job in jobs:
        ranks = evaluation.evaluation_layout(job.stage, plan.evaluation)["ranks"]
        found.append((job.model, Job(job.name, job.task, local_executor(ranks))))
    return found


def jobs_left(plan: LadderRun, stages: Sequence[ResolvedStage]) -> list[ModelJob]:
    """Return the jobs without those of models that have all results and meet their thresholds."""
    jobs = model_jobs(plan, stages)
    measured = {job.name for job in jobs if _may_have_results(plan, job)}
    if not measured:
        return jobs
    from eval.gates.chain_suites import found_tasks

    found = found_tasks(suites_of(plan.ladder))
    return [job for job in jobs if job.name not in measured or not _has_passed(plan, job, found)]


def model_jobs(plan: LadderRun, stages: Sequence[ResolvedStage]) -> list[ModelJob]:
    """Return a job for each model in order: the one before the first stage, and each stage."""
    if not plan.ladder.suites:
        return []
    require_harness()
    first = stages[0]
    before = plan.before(first.name)
    if before is None and first.recipe.resume.start is not None:
        before = BASE
    thresholds = {name: stage.gate.suites for name, stage in plan.chosen}
    found = [] if before is None else [_job(plan, first, before, None, ())]
    for stage in stages:
        found.append(_job(plan, stage, stage.name, before, thresholds[stage.name]))
        before = stage.name
    return found


def _job(
    plan: LadderRun,
    stage: ResolvedStage,
    model: str,
    before: str | None,
    thresholds: Sequence[SuiteThreshold],
) -> ModelJob:
    from eval.gates.chain_suites import run_suites

    layout = evaluation.evaluation_layout(stage, replace(plan.evaluation, pp=1))
    del layout["ranks"], layout["pipeline_parallel"]  # the harness evaluates without PP
    task = nemo_run.Partial(
        run_suites,
        run=str(plan.run.resolve()),
        model=model,
        first=stage.name,
        store=str(plan.store.resolve()),
        suites=[as_config_node(suite) for suite in suites_of(plan.ladder)],
        before=before,
        thresholds=[as_config_node(threshold) for threshold in thresholds],
        verify=plan.verify is not False,
        **layout,
    )
    return ModelJob(name=f"suites_{model}", model=model, stage=stage, task=task)


def _may_have_results(plan: LadderRun, job: ModelJob) -> bool:
    """Whether a model is there with the recipe that it is loaded by, and the store's tokenizer."""
    if not plan.store.exists() or not (stage_folder(plan.run, job.task.first) / RECIPE).is_file():
        return False
    if job.model == job.stage.name:
        return job.stage.is_done
    folder = stage_folder(plan.run, job.model) / "checkpoints"
    return job.model == BASE or newest_checkpoint(folder) is not None


def _has_passed(plan: LadderRun, job: ModelJob, found: "Sequence[Found]") -> bool:
    from eval.gates.chain_suites import have_passed

    stages = dict(plan.chosen)
    thresholds = stages[job.model].gate.suites if job.model in stages else ()
    asked: dict[str, Any] = {"before": job.task.before, "device": job.task.device}
    return have_passed(
        job.task.run, job.model, job.task.first, job.task.store, suites_of(plan.ladder), found,
        thresholds=thresholds, **asked,
    )  # fmt: skip


def _of_suite(suite: SuiteRun, tokenizer: Path | None) -> dict[str, bool]:
    """Return the names of tasks and groups, and whether they make prompts of a length."""
    tasks, groups, manager = find(suite.tasks, Path(suite.include) if suite.include else None)
    for task in tasks:
        if task.makes_prompts and tokenizer is None:
            raise ValueError(
                f"task {task.name} makes its prompts with the tokenizer of the store, which the "
                "chain would train first; make the store before: longhaul prepare"
            )
        length = suite.lengths[0] if task.makes_prompts else None
        built(task, manager, tokenizer=tokenizer or Path(), length=length, limit=1)
    made: dict[str, SuiteTask] = {task.name: task for task in tasks}
    of_groups = {
        group.name: any(made[name].makes_prompts for name in group.tasks) for group in groups
    }
    return {name: task.makes_prompts for name, task in made.items()} | of_groups


def _refused(threshold: SuiteThreshold, known: dict[str, tuple[SuiteRun, bool]]) -> str:
    """Return why a threshold will have no score, or nothing."""
    if threshold.task not in known:
        return f"is of no task that the ladder's suites run; they are {', '.join(known)}"
    suite, makes_prompts = known[threshold.task]
    lengths = ", ".join(f"{length:,}" for length in suite.lengths)
    if makes_prompts and threshold.length not in suite.lengths:
        return f"needs a length of the prompts that the suite makes: {lengths}"
    if not makes_prompts and threshold.length is not None:
        return "has a length, and the task does not make its prompts; leave it out"
    return ""


def _base_context(plan: LadderRun, first: ResolvedStage) -> int:
    """Return the context of the weights that the first stage starts from; 0 for random ones."""
    start = first.recipe.resume.start
    if start is None or plan.before(first.name) is not None:
        return 0
    _, facts = stated_rotation(start, "the suites cannot be run on the base model")
    return int(facts["seq_length"])
