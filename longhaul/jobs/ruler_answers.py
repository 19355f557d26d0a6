# SPDX-License-Identifier: Apache-2.0
"""The jobs that answer RULER's samples; imports NeMo."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemo_run

from eval.answers.ruler import answer_by_export, answer_by_stage
from slurm.experiment import Job
from slurm.local_executor import local_executor

NAME = "ruler-predict"


def stage_job(stage: Path, *, ranks: int, files: Sequence[Path], out: Path, **choices: Any) -> Job:
    """Return the job that answers with a stage; `choices` are those of `answer_by_stage`."""
    task = nemo_run.Partial(
        answer_by_stage, stage=str(stage.resolve()), **_places(files, out), **choices
    )
    return Job(NAME, task, local_executor(ranks))


def export_job(
    export: Path, *, ranks: int, files: Sequence[Path], out: Path, **choices: Any
) -> Job:
    """Return the job that answers with an export; `choices` are those of `answer_by_export`."""
    task = nemo_run.Partial(
        answer_by_export, export=str(export.resolve()), **_places(files, out), **choices
    )
    return Job(NAME, task, local_executor(ranks))


def _places(files: Sequence[Path], out: Path) -> dict[str, Any]:
    return {"files": [str(file.resolve()) for file in files], "out": str(out.resolve())}
