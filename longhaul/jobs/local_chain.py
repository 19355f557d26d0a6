# SPDX-License-Identifier: Apache-2.0
"""The recipes and jobs of a ladder; imports NeMo."""

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import nemo_run

from eval.run_folder import evaluation_path, write_json
from longhaul.jobs import evaluation, records, stage_checks, training
from longhaul.jobs.evaluation import evaluation_job
from longhaul.jobs.ladder_run import Plan
from longhaul.jobs.store_source import require_heldout
from longhaul.terminal.next_commands import OnCluster
from longhaul.version import versions
from recipes.checkpoints.marker import is_finished, steps_taken
from recipes.nemo2.settings import place
from recipes.resolved import overrides, read
from recipes.resolved.read import trained_length
from recipes.shipped import factories
from recipes.shipped.table import ROWS
from recipes.spec.stage import Stage
from slurm.experiment import Job

PLACE = re.compile(r"log\.|resume\.|data\.store|trainer\.callbacks\[\d+\]\.(path|folder)")
EVALUATION_DOCUMENTS = 12
EVALUATION_TRIALS = 1


def recipes(plan: Plan, words: Sequence[str], device: str | None) -> list[nemo_run.Partial]:
    """Return the recipe of each stage, placed in the run folder, overridden and checked.

    Raises ValueError for an override that would put all stages in one place.
    """
    made = []
    for name, stage in plan.chosen:
        made.append(placed(plan, stage, factories.recipe_named(name), words, device))
    return made


def placed(
    plan: Plan, stage: Stage, recipe: nemo_run.Partial, words: Sequence[str], device: str | None
) -> nemo_run.Partial:
    """Return a stage's recipe in the run folder, overridden and checked."""
    place(recipe, plan.card, plan.ladder, stage, run_to=plan.run, store=plan.store)
    if plan.verify is False:
        recipe.resume.verify = False
    return overridden(recipe, words, device)


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


def require(made: list[nemo_run.Partial], *, started: bool) -> None:
    """Raise ValueError for what would fail once ranks run, including the first stage's start.

    If nothing is `started`, only for a run folder that holds another run.
    """
    for recipe in made:
        stage_checks.require_same(recipe)
    if not started:
        return
    for recipe in made:
        stage_checks.require_device(recipe)
    stage_checks.require_start(made[0])
    require_store(made)


def require_store(made: list[nemo_run.Partial]) -> None:
    """Raise ValueError if the store does not fit a stage, or cannot evaluate the longest."""
    for recipe in made:
        manifest = stage_checks.require_inputs(recipe)
    require_heldout(manifest, longest(made))


def longest(made: Sequence[nemo_run.Partial]) -> int:
    """Return the longest context that a stage trains for."""
    return max(trained_length(recipe) for recipe in made)


def jobs(
    plan: Plan,
    made: list[nemo_run.Partial],
    *,
    record: bool,
    documents: int = EVALUATION_DOCUMENTS,
    trials: int = EVALUATION_TRIALS,
) -> list[Job]:
    """Return what is left to do: unfinished stages in order, then the evaluation.

    With `record` the run folder receives the facts of the run and the resolved recipes.
    """
    unfinished = [recipe for recipe in made if not is_done(recipe)]
    for recipe in unfinished:
        _require_this_machine(plan, recipe)
    if record:
        write_records(plan, made)
    names = [recipe.log.name for recipe in made]
    left = [training.training_job(recipe) for recipe in unfinished]
    evaluated = all(evaluation_path(plan.run, name).is_file() for name in names)
    if left or not evaluated:
        left.append(
            evaluation_job(
                plan.run,
                names,
                lengths=sorted({trained_length(recipe) for recipe in made}),
                store=plan.store,
                documents=documents,
                trials=trials,
                verify=plan.verify is not False,
                **evaluation.evaluation_layout(made[-1]),
            )
        )
    return left


def _require_this_machine(plan: Plan, recipe: nemo_run.Partial) -> None:
    """Raise ValueError, with what submits the ladder, for a stage laid out on several nodes."""
    nodes = int(recipe.trainer.num_nodes)
    if nodes == 1:
        return
    row = ROWS[recipe.log.name]
    submitted = OnCluster(
        card=plan.card,
        ladder=plan.ladder,
        cluster=row.cluster,
        stage=plan.only,
        nodes=None if nodes == row.nodes else nodes,
    )
    explained = f" ({submitted.explained})" if submitted.explained else ""
    raise ValueError(
        f"{recipe.log.name} is laid out on {nodes} nodes and this machine is one; submit the "
        f"ladder to a cluster: {submitted.command}{explained}"
    )


def metrics(recipe: nemo_run.Partial) -> Path:
    """Return the file that a stage writes one line per step to."""
    return Path(recipe.trainer.callbacks[0].path)


def is_done(recipe: nemo_run.Partial) -> bool:
    """Return whether a stage has all its steps."""
    return is_finished(Path(recipe.resume.resume_from_directory), recipe.trainer.max_steps)


def standing(made: Sequence[nemo_run.Partial]) -> list[str]:
    """Return a sentence for each stage that has checkpoints: where it resumes, or that it ended."""
    sentences = []
    for recipe in made:
        taken = steps_taken(Path(recipe.resume.resume_from_directory))
        name, steps = recipe.log.name, int(recipe.trainer.max_steps)
        if taken >= steps:
            sentences.append(f"{name} has all its {steps:,} steps and is not trained again")
        elif taken:
            sentences.append(f"{name} resumes from step {taken:,} of {steps:,}")
    return sentences


def write_records(plan: Plan, made: list[nemo_run.Partial]) -> None:
    """Write the facts of the run and each stage's resolved recipe."""
    plan.run.mkdir(parents=True, exist_ok=True)
    before = "scratch" if plan.only is None else plan.before(made[0].log.name) or "scratch"
    for recipe in made:
        records.record(recipe, start=before)
        before = recipe.log.name
    names = [recipe.log.name for recipe in made] if plan.only is None else plan.stage_names
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
