# SPDX-License-Identifier: Apache-2.0
"""The job that evaluates stages of a run; imports NeMo."""

from pathlib import Path

import nemo_run

from eval.evaluate import evaluate
from eval.results import stage_folder
from recipes import yaml_file
from recipes.finished import newest_checkpoint
from slurm.launch import Job
from slurm.local import local_executor


def evaluation_job(
    run: Path,
    stages: list[str],
    *,
    lengths: list[int],
    store: Path,
    documents: int,
    trials: int,
    ranks: int,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
) -> Job:
    """Return the job that writes `RUN/eval/<stage>.json` for each stage, up to max(`lengths`)."""
    task = nemo_run.Partial(
        evaluate,
        run=str(run.resolve()),
        stages=stages,
        store=str(store.resolve()),
        lengths=lengths,
        documents=documents,
        trials=trials,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        device=device,
    )
    return Job("evaluate", task, local_executor(ranks))


def require_trained(run: Path, stages: list[str]) -> None:
    """Raise ValueError for a stage without a complete checkpoint."""
    for name in stages:
        if newest_checkpoint(stage_folder(run, name) / "checkpoints") is None:
            raise ValueError(f"{name} has no complete checkpoint in {run}; train it first")


def trained_store(run: Path, stage: str) -> Path:
    """Return the store that a stage trained on, from its resolved recipe."""
    return Path(yaml_file.read(stage_folder(run, stage) / "config.yaml").data.store)
