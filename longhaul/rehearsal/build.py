# SPDX-License-Identifier: Apache-2.0
"""The recipes and jobs of a rehearsal, and the values that they plan; imports NeMo."""

from collections.abc import Sequence
from pathlib import Path

import fiddle as fdl
import nemo_run

from data.store import Manifest
from data.train_short.impactful_tokens import FILE, ImpactfulTokens
from longhaul.jobs import local_chain
from longhaul.jobs.ladder_run import LadderRun
from longhaul.rehearsal.checks import WEIGHT_SUMS, Planned
from recipes.checkpoints.weight_checksums import WeightChecksums
from recipes.nemo2.settings import place
from recipes.pretrain import pretrain
from recipes.rehearsal.plan import Rehearsal
from recipes.resolved import read
from recipes.resolved.stage import ResolvedStage
from recipes.spec.stage import warmup_steps
from slurm.experiment import Job

DOCUMENTS = 4
"""Held-out documents of the evaluation."""


def stages(
    rehearsal: Rehearsal, words: Sequence[str], *, run: Path, store: Path
) -> list[ResolvedStage]:
    """Return the recipe of each stage, placed, overridden and checked."""
    made: list[ResolvedStage] = []
    for part in rehearsal.parts:
        stage = part.stage
        recipe = pretrain(rehearsal.card, part.ladder, stage.seq_length, part.layout)
        place(recipe, rehearsal.card, part.ladder, stage, run_to=run, store=store)
        if stage.start == "card":
            recipe.resume.start = made[0].recipe.log.ckpt.dirpath
        # A checkpoint or a validation costs as much as a few steps: once, after the last.
        recipe.log.ckpt.every_n_train_steps = recipe.trainer.val_check_interval = stage.steps
        recipe.trainer.limit_val_batches = 1
        recipe = local_chain.overridden(recipe, words)
        path = read.folder_of(recipe) / WEIGHT_SUMS
        recipe.trainer.callbacks.append(nemo_run.Config(WeightChecksums, path=str(path)))
        made.append(ResolvedStage.of(recipe))
    return made


def planned(stage: ResolvedStage) -> Planned:
    """Return the values that a resolved recipe plans."""
    recipe = stage.recipe
    warmup = warmup_steps(recipe.optim.lr_scheduler.warmup_ratio, stage.steps)
    return Planned(
        name=stage.name,
        seq_length=stage.seq_length,
        steps=stage.steps,
        tokens_per_step=stage.tokens_per_batch,
        # NeMo's rate peaks at the step after the last one of the warm-up.
        first_rate=recipe.optim.config.lr / (warmup + 1),
        rope=fdl.build(recipe.model.config.rope).to_dict(),
        layout=stage.layout.degrees,
    )


def jobs(rehearsal: Rehearsal, made: list[ResolvedStage], *, run: Path, store: Path) -> list[Job]:
    """Return the jobs in order, after the checks of `longhaul run`; the recipes are written."""
    plan = LadderRun(ladder=rehearsal.parts[1].ladder, card=rehearsal.card, run=run, store=store)
    local_chain.require(made, started=True)
    return local_chain.jobs(plan, made, record=True, documents=DOCUMENTS, trials=0)


def require_impactful(made: list[ResolvedStage], *, stand_in: bool) -> bool:
    """Require the store's impactful tokens if a stage uses them; with `stand_in` make them up.

    Returns whether they were made up: every tenth token of the vocabulary.
    """
    chosen = [getattr(stage.recipe.data, "sentences", None) for stage in made]
    if not any(one is not None and one.anchors == "impactful" for one in chosen):
        return False
    manifest = Manifest.load(made[0].recipe.data.store)
    if stand_in and not (manifest.root / FILE).exists():
        ImpactfulTokens(
            tokens=tuple(range(0, manifest.tokenizer.vocab_size, 10)),
            share=0.1,
            split="train",
            sha256=manifest.train.sha256,
            before="made up",
            after="made up",
            places=0,
        ).write(manifest.root)
        return True
    ImpactfulTokens.load(manifest)
    return False
