# SPDX-License-Identifier: Apache-2.0
"""RULER's samples in a chain, here or on Slurm: checks before training, and the jobs; imports NeMo.

A stage whose gate has thresholds of RULER answers the samples after its training.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import nemo_run

from data.store import TOKENIZER, Manifest
from data.tokenization.tokenizer import load
from eval.gates.chain_ruler import have_passed, run_ruler
from eval.ruler.predictions import questions, require_room, require_tokenizer
from eval.ruler.samples import read_manifest
from longhaul.jobs import evaluation
from longhaul.jobs.chain_suites import ModelJob
from longhaul.jobs.ladder_run import LadderRun
from longhaul.jobs.origin import origin
from recipes.resolved.stage import ResolvedStage
from recipes.spec.gate import MEAN, RulerThresholds
from recipes.spec.naming import length_shown


def require_samples(
    plan: LadderRun, stages: Sequence[ResolvedStage], tokenizer: str | None = None
) -> None:
    """Raise ValueError for samples that cannot be answered after training.

    `tokenizer` is that of a store which the chain will make; None if it trains one.
    """
    for (name, of_ladder), stage in zip(plan.chosen, stages, strict=True):
        ruler = of_ladder.gate.ruler
        if ruler is None:
            continue
        with _told_of(name):
            asked = questions(files_of(ruler, stage), ruler.limit)
            require_room(asked, stage.trained_length, name)
            if plan.store.exists():
                tokenizer = str(Manifest.load(plan.store).tokenizer_path)
            elif tokenizer is None:
                raise ValueError(
                    f"the samples in {ruler.samples} are of a tokenizer that the chain would train "
                    "first; make the store before: longhaul prepare"
                )
            require_tokenizer(asked, load(tokenizer), f"the store {plan.store}")


def model_jobs(plan: LadderRun, stages: Sequence[ResolvedStage]) -> list[ModelJob]:
    """Return the job of each stage whose gate has thresholds of RULER."""
    found = []
    for (name, of_ladder), stage in zip(plan.chosen, stages, strict=True):
        ruler = of_ladder.gate.ruler
        if ruler is None:
            continue
        layout = evaluation.evaluation_layout(stage, replace(plan.evaluation, pp=1))
        with _told_of(name):
            files = files_of(ruler, stage)
        task = nemo_run.Partial(
            run_ruler,
            run=str(plan.run.resolve()),
            stage=name,
            tokenizer=str(plan.store.resolve() / TOKENIZER),
            files=[str(file.resolve()) for file in files],
            least=dict(ruler.least),
            limit=ruler.limit,
            tensor_parallel=layout["tensor_parallel"],
            context_parallel=layout["context_parallel"],
            device=layout["device"],
            verify=plan.verify is not False,
            **origin(),
        )
        found.append(ModelJob(name=f"ruler_{name}", model=name, stage=stage, task=task))
    return found


def jobs_left(plan: LadderRun, stages: Sequence[ResolvedStage]) -> list[ModelJob]:
    """Return the jobs without those of stages that have all answers and meet their thresholds."""
    return [job for job in model_jobs(plan, stages) if not job.stage.is_done or not _passed(job)]


def files_of(ruler: RulerThresholds, stage: ResolvedStage) -> list[Path]:
    """Return the sample files of a gate: those of its tasks, or of all tasks for their mean.

    Raises ValueError if a task has no samples of the length.
    """
    folder, length = Path(ruler.samples), ruler.length or stage.trained_length
    rows = [row for row in read_manifest(folder).values() if row.length == length]
    tasks = {row.task for row in rows}
    missing = [name for name in ruler.least if name != MEAN and name not in tasks]
    if missing or not rows:
        what = f"samples of {', '.join(missing)}" if missing and rows else "samples"
        raise ValueError(
            f"{folder} has no {what} at {length_shown(length)} tokens; make them: longhaul ruler "
            f"make --lengths {length_shown(length)}, or state the folder and the length of others"
        )
    return [folder / row.file for row in rows if MEAN in ruler.least or row.task in ruler.least]


@contextmanager
def _told_of(name: str) -> Iterator[None]:
    """Begin the message of a ValueError with the gate that it is of."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the gate of {name}: ruler: {error}") from None


def _passed(job: ModelJob) -> bool:
    told = job.task
    files = [Path(file) for file in told.files]
    return have_passed(Path(told.run), told.stage, files, told.least, told.limit, told.device)
