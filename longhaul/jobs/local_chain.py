# SPDX-License-Identifier: Apache-2.0
"""The resolved stages and the jobs of a ladder; imports NeMo."""

import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import nemo_run
import torch

from data.tokenization.tokenizer import first_token_notes
from eval.run_folder import evaluation_path, write_json
from longhaul.jobs import evaluation, records, stage_checks, training
from longhaul.jobs.evaluation import evaluation_job
from longhaul.jobs.ladder_run import LadderRun
from longhaul.jobs.store_source import require_heldout
from longhaul.terminal.messages import note
from longhaul.terminal.next_commands import submitted
from longhaul.version import versions
from recipes.nemo2.settings import place
from recipes.resolved import overrides, read
from recipes.resolved.stage import ResolvedStage
from recipes.shipped.row import Row
from recipes.spec.stage import Stage
from slurm.experiment import Job

PLACE = re.compile(
    r"log\.(?!ckpt\.(?!dirpath|filename))|resume\.|data\.store"
    r"|trainer\.callbacks\[\d+\]\.(path|folder)"
)
"""Overrides of a path; those of `log.ckpt` also say when checkpoints are saved and kept."""
EVALUATION_DOCUMENTS = 48
EVALUATION_TRIALS = 1


def stages(
    plan: LadderRun,
    rows: Sequence[Row],
    words: Sequence[str],
    device: str | None,
    change: "Callable[[nemo_run.Partial], nemo_run.Partial] | None" = None,
) -> list[ResolvedStage]:
    """Return each stage's row as its recipe, placed in the run folder, overridden and checked.

    `change` is applied to a recipe before the overrides. Raises ValueError for an override that
    would put all stages in one place.
    """
    return [
        placed(plan, stage, row() if change is None else change(row()), words, device)
        for (_, stage), row in zip(plan.chosen, rows, strict=True)
    ]


def placed(
    plan: LadderRun,
    stage: Stage,
    recipe: nemo_run.Partial,
    words: Sequence[str],
    device: str | None,
) -> ResolvedStage:
    """Return a stage with its recipe in the run folder, overridden and checked."""
    place(recipe, plan.card, plan.ladder, stage, run_to=plan.run, store=plan.store)
    if plan.verify is False:
        recipe.resume.verify = False
    return ResolvedStage.of(overridden(recipe, words, device))


def overridden(
    recipe: nemo_run.Partial, words: Sequence[str], device: str | None = None
) -> nemo_run.Partial:
    """Return a placed recipe with the command line's overrides, checked, its paths absolute."""
    for word in words:
        if PLACE.match(word):
            raise ValueError(
                f"{word.partition('=')[0]} is a path that all stages would share; "
                "use --out and --store"
            )
    recipe = overrides.override(recipe, words)
    overrides.on_device(recipe, device)
    read.absolute(recipe)
    return recipe


def require(stages: Sequence[ResolvedStage], *, started: bool) -> None:
    """Raise ValueError for what would fail once ranks run, including the first stage's start.

    If nothing is `started`, only for a run folder that holds another run, and for a store that is
    there and does not fit.
    """
    for stage in stages:
        stage_checks.require_same(stage)
    if not started:
        if Path(stages[0].recipe.data.store).exists():
            require_store(stages, evaluated=False, packed=False)
        return
    for stage in stages:
        stage_checks.require_device(stage)
    stage_checks.require_start(stages[0])
    require_store(stages)


def require_store(
    stages: Sequence[ResolvedStage], *, evaluated: bool = True, packed: bool = True
) -> None:
    """Raise ValueError if the store does not fit a stage, or cannot evaluate the longest.

    With `packed` the store is packed for stages with a mix.
    """
    for stage in stages:
        manifest = stage_checks.require_inputs(stage)
        for words in stage_checks.mix_notes(stage, manifest):
            note(words)
        if packed:
            stage_checks.pack(stage, manifest)
    for words in first_token_notes(manifest):
        note(words)
    if evaluated:
        require_heldout(manifest, longest(stages))


def require_evaluation(plan: LadderRun, stages: Sequence[ResolvedStage], *, started: bool) -> None:
    """Raise ValueError if the stages cannot be evaluated under the layout that is asked for.

    If nothing is `started`, the GPUs of this machine do not count.
    """
    most = torch.cuda.device_count() if started else None
    evaluation.require_parallel(
        stages[-1], plan.evaluation, longest(stages), most, "this machine has"
    )


def longest(stages: Sequence[ResolvedStage]) -> int:
    """Return the longest context that a stage trains for."""
    return max(stage.trained_length for stage in stages)


def jobs(
    plan: LadderRun,
    stages: Sequence[ResolvedStage],
    *,
    record: bool,
    documents: int = EVALUATION_DOCUMENTS,
    trials: int = EVALUATION_TRIALS,
    scored: Sequence[tuple[str, Job]] = (),
) -> list[Job]:
    """Return what is left to do: unfinished stages in order, then the evaluation.

    `scored` are jobs of suites and RULER with the model that each runs on
    (`longhaul.jobs.chain_suites`): those of a stage follow its training, and others come first.
    They find out themselves what is left.

    With `record` the run folder receives the facts of the run and the resolved recipes.
    """
    unfinished = [stage for stage in stages if not stage.is_done]
    if record:
        write_records(plan, stages)
    names = [stage.name for stage in stages]
    left = [job for model, job in scored if model not in names]
    for stage in stages:
        if stage in unfinished:
            left.append(training.training_job(stage))
        left += [job for model, job in scored if model == stage.name]
    evaluated = all(evaluation_path(plan.run, name).is_file() for name in names)
    if unfinished or not evaluated:
        left.append(
            evaluation_job(
                plan.run,
                names,
                lengths=sorted({stage.trained_length for stage in stages}),
                store=plan.store,
                documents=documents,
                trials=trials,
                verify=plan.verify is not False,
                **evaluation.evaluation_layout(stages[-1], plan.evaluation),
            )
        )
    return left


def several_nodes(plan: LadderRun, stages: Sequence[ResolvedStage], rows: Sequence[Row]) -> str:
    """Return what submits the ladder, if a stage that is left takes several nodes; or nothing."""
    for stage, row in zip(stages, rows, strict=True):
        if stage.nodes > 1 and not stage.is_done:
            job = submitted(row, stage.layout.world_size, plan.only)
            explained = f" ({job.explained})" if job.explained else ""
            return (
                f"{stage.name} is laid out on {stage.nodes} nodes and this machine is one; submit "
                f"the ladder to a cluster: {job.command}{explained}"
            )
    return ""


def standing(stages: Sequence[ResolvedStage]) -> list[str]:
    """Return a sentence for each stage that has checkpoints: where it resumes, or that it ended."""
    sentences = []
    for stage in stages:
        taken, name, steps = stage.steps_taken, stage.name, stage.steps
        if taken >= steps:
            sentences.append(f"{name} has all its {steps:,} steps and is not trained again")
        elif taken:
            sentences.append(f"{name} resumes from step {taken:,} of {steps:,}")
    return sentences


def write_records(plan: LadderRun, stages: Sequence[ResolvedStage]) -> None:
    """Write the facts of the run and each stage's resolved recipe."""
    plan.run.mkdir(parents=True, exist_ok=True)
    before = "scratch" if plan.only is None else plan.before(stages[0].name) or "scratch"
    for stage in stages:
        records.record(stage, start=before)
        before = stage.name
    names = [stage.name for stage in stages] if plan.only is None else plan.stage_names
    write_json(
        plan.run / "run.json",
        {
            "ladder": plan.ladder.name,
            "card": plan.card.name,
            "stages": names,
            "source": plan.ladder.source,
            "versions": {"python": platform.python_version(), **versions()},
            "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        },
    )
