# SPDX-License-Identifier: Apache-2.0
"""The job that evaluates stages of a run; imports NeMo."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nemo_run
import torch

from custom_modules.context_parallel.config import ContextParallelKind
from data.store import Manifest, require_tokenizer
from eval.evaluate import evaluate
from eval.rope_search.evolution import Settings
from eval.rope_search.run import find_factors
from longhaul.jobs.ladder_run import EvaluationParallel
from longhaul.jobs.origin import origin
from recipes.checkpoints.files import require_whole
from recipes.checkpoints.marker import RECIPE, checkpoint_facts, newest_checkpoint
from recipes.checkpoints.rotation import rotation_before
from recipes.constraints import shapes
from recipes.resolved import yaml_file
from recipes.resolved.check import training_step
from recipes.resolved.stage import ResolvedStage
from recipes.spec.naming import stage_folder
from slurm.experiment import Job
from slurm.local_executor import local_executor


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
    pipeline_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
    **choices: Any,
) -> Job:
    """Return the job that writes `RUN/eval/<stage>.json` for each stage, up to max(`lengths`).

    `choices` are further ones of `eval.evaluate.evaluate`.
    """
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
        pipeline_parallel=pipeline_parallel,
        device=device,
        verify=verify,
        **origin(),
        **choices,
    )
    return Job("evaluate", task, local_executor(ranks))


def require_trained(run: Path, stages: list[str], manifest: Manifest) -> None:
    """Raise ValueError for a stage whose checkpoint is missing, damaged or of another tokenizer.

    The same applies to one that was trained with another rotation than its stage configures.
    """
    for name in stages:
        found = newest_checkpoint(stage_folder(run, name) / "checkpoints")
        facts = None if found is None else checkpoint_facts(found)
        if found is None or facts is None:
            raise ValueError(f"{name} has no complete checkpoint in {run}; train it first")
        require_tokenizer(manifest, facts, of=f"{name} was trained with")
        require_whole(found)
        rotation_before(found)


def require_layout(
    run: Path,
    stages: list[str],
    *,
    ranks: int,
    tp: int,
    cp: int,
    length: int,
    device: str,
    pp: int = 1,
) -> None:
    """Raise ValueError for a layout that does not suit the models, the length or this machine."""
    found = torch.cuda.device_count()
    if device == "cuda" and found < ranks:
        raise ValueError(f"{ranks} ranks on cuda need as many GPUs; this machine has {found}")
    for name in stages:
        for sentence in _violations(recipe_of(run, name), ranks, (tp, cp, pp), length):
            raise ValueError(f"{name}: {sentence}")


def _violations(
    recipe: nemo_run.Partial, ranks: int, sizes: tuple[int, int, int], length: int
) -> Iterator[str]:
    """Yield one sentence for each constraint that an evaluation of a model would violate.

    `sizes` are TP, CP and PP.
    """
    tp, cp, pp = sizes
    step = replace(
        training_step(recipe),
        seq_length=length,
        tp=tp,
        cp=cp,
        cp_kind=ContextParallelKind(),
        pp=pp,
        vpp=1,
        ends_count=None,
        ep=1,
        etp=None,
        world_size=ranks,
        ranks_per_node=ranks,
        global_batch=ranks,
        micro_batch=1,
    )
    return shapes.violations(step)


def require_parallel(
    stage: ResolvedStage, asked: EvaluationParallel, length: int, gpus: int | None, of_what: str
) -> None:
    """Raise ValueError if a stage cannot be evaluated under the layout that is asked for.

    `gpus` is how many there are, None if that is not known, and `of_what` says where.
    """
    if not asked.asked:
        return
    layout = evaluation_layout(stage, asked)
    ranks, (tp, cp, pp) = layout["ranks"], sizes_of(layout)
    of_stage = f"{stage.name} cannot be evaluated under TP {tp}, CP {cp} and PP {pp}"
    for sentence in _violations(stage.recipe, ranks, (tp, cp, pp), length):
        raise ValueError(f"{of_stage}: {sentence}; change --eval-tp, --eval-cp or --eval-pp")
    if layout["device"] == "cuda" and gpus is not None and ranks > gpus:
        raise ValueError(
            f"{of_stage}: that takes {ranks} GPUs, and {of_what} {gpus}; lower --eval-tp, "
            "--eval-cp or --eval-pp"
        )


def recipe_of(run: Path, stage: str) -> nemo_run.Partial:
    """Return the resolved recipe that a stage was trained with."""
    return yaml_file.read(stage_folder(run, stage) / RECIPE)


def evaluation_layout(stage: ResolvedStage, asked: EvaluationParallel) -> dict[str, Any]:
    """Return the ranks, kinds of parallelism and device to evaluate a stage with.

    On GPUs those that trained it, since its length needs them; on CPU two ranks that share the
    documents, which is faster than sharing each. TP, CP or PP that is asked for takes their place.
    """
    layout = stage.layout
    on_gpu = layout.device == "cuda"
    tp, cp, pp = (layout.tp, layout.cp.size, layout.pp) if on_gpu else (1, 1, 1)
    tp, cp, pp = asked.tp or tp, asked.cp or cp, asked.pp or pp
    ranks = tp * cp * pp
    return {
        "ranks": ranks if on_gpu or ranks > 1 else min(2, os.cpu_count() or 1),
        "tensor_parallel": tp,
        "context_parallel": cp,
        "pipeline_parallel": pp,
        "device": layout.device,
    }


def sizes_of(layout: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return TP, CP and PP of an evaluation's layout."""
    names = ("tensor_parallel", "context_parallel", "pipeline_parallel")
    tp, cp, pp = (int(layout[name]) for name in names)
    return tp, cp, pp


def describe(stages: Sequence[ResolvedStage], asked: EvaluationParallel) -> list[str]:
    """Return the layout of each stage's evaluation; nothing if none is asked for."""
    layouts = [evaluation_layout(stage, asked) for stage in stages] if asked.asked else []
    return [
        f"{stage.name} is evaluated on {layout['ranks']} ranks: TP {{}}, CP {{}}, PP {{}}".format(
            *sizes_of(layout)
        )
        for stage, layout in zip(stages, layouts, strict=False)
    ]


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
