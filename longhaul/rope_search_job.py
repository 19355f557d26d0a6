# SPDX-License-Identifier: Apache-2.0
"""The job that searches a stage's rotation; imports NeMo."""

from pathlib import Path
from typing import Any

import nemo_run

from eval.rope_search.evolution import Settings
from eval.rope_search.run import find_factors
from slurm.experiment import Job
from slurm.local_executor import local_executor


def search_job(
    run: Path,
    stage: str,
    *,
    store: Path,
    target: int,
    out: Path,
    progress: Path,
    settings: Settings,
    ranks: int,
    **choices: Any,
) -> Job:
    """Return the job that writes `out`; `choices` are those of `find_factors`."""
    task = nemo_run.Partial(
        find_factors,
        run=str(run.resolve()),
        stage=stage,
        store=str(store.resolve()),
        target=target,
        out=str(out.resolve()),
        progress=str(progress.resolve()),
        settings=nemo_run.Config(
            Settings,
            population=settings.population,
            iterations=settings.iterations,
            mutation=settings.mutation,
            seed=settings.seed,
        ),
        **choices,
    )
    return Job("rope-search", task, local_executor(ranks))
