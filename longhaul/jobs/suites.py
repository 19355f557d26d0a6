# SPDX-License-Identifier: Apache-2.0
"""The jobs that evaluate models on tasks of lm-evaluation-harness; imports NeMo and the harness."""

from pathlib import Path
from typing import Any

import nemo_run

from eval.harness.run import evaluate_export, evaluate_stages
from slurm.experiment import Job
from slurm.local_executor import local_executor


def stages_job(run: Path, stages: list[str], *, ranks: int, **choices: Any) -> Job:
    """Return the job that writes results of stages; `choices` are those of `evaluate_stages`."""
    task = nemo_run.Partial(evaluate_stages, run=str(run.resolve()), stages=stages, **choices)
    return Job("evaluate-suite", task, local_executor(ranks))


def export_job(run: Path, export: Path, **choices: Any) -> Job:
    """Return the job that writes results of an export; `choices` are those of `evaluate_export`."""
    task = nemo_run.Partial(
        evaluate_export, run=str(run.resolve()), export=str(export.resolve()), **choices
    )
    return Job("evaluate-suite", task, local_executor(1))
