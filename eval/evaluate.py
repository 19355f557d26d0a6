# SPDX-License-Identifier: Apache-2.0
"""Evaluate the stages of a run: loss by position and the passkey grid, one JSON file per stage.

On request also the model that training started from (`eval.base_model`), under the same settings.
Runs on every rank of a torchrun job; `longhaul evaluate` and `longhaul run` launch it. An
interrupted evaluation continues with the parts that it has not finished (`eval.finished_parts`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from custom_modules.gpt.rotation import rotation_of
from data.store import MANIFEST, Manifest
from data.token_files.token_counts import token_counts
from eval import load_model
from eval.answers.passkey import PASSKEY_SEED, PROMPT_VERSION
from eval.answers.passkey_grid import DEPTHS, Prompts, passkey_grid
from eval.base_model import BaseModel, base_models
from eval.distributed import parallel_ranks
from eval.finished_parts import FinishedParts, digest, partial_path
from eval.loss import context_gain as context_gains
from eval.loss.held_out import held_out, held_out_in_turn
from eval.loss.loss_by_position import WINDOW_SEED, loss_by_position, mean_over, position_bands
from eval.loss.short_loss import short_documents, short_loss
from eval.measurements import BaseRecord, ByPosition, ContextGain, Passkey, RangeMean, ShortLoss
from eval.model_facts import parameters_of, tokens_seen
from eval.provenance import SHORT, Provenance, now
from eval.report.evaluations import (
    Settings,
    base_record,
    evaluated_with,
    write_evaluation,
    write_record,
)
from eval.run_folder import (
    BUCKET,
    Evaluation,
    read_stage,
)
from eval.uncertainty import standard_error
from recipes.checkpoints.marker import MARKER, RECIPE, newest_checkpoint, steps_taken
from recipes.spec.naming import stage_folder
from recipes.spec.schema import Number

Load = Callable[[], LongContextGPT]
"""Loads the model at the first call: not at all if every part is there."""


def evaluate(
    run: str,
    stages: list[str],
    store: str,
    lengths: list[int],
    documents: int = 24,
    trials: int = 2,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
    pipeline_parallel: int = 1,
    passkey_lengths: Sequence[int] = (),
    depths: Sequence[float] = DEPTHS,
    base: bool = False,
    missing: bool = False,
    context_gain: bool = False,
    command: str = "",
    commit: str = "",
) -> None:
    """Write `RUN/eval/<stage>.json` for each stage, at the longest of `lengths`.

    Existing evaluations with other settings are kept (`eval.report.evaluations`).

    `lengths` bound the ranges of positions; by default passkey prompts have these lengths too. With
    `trials` 0 there are no prompts. With `base` the base model of the stages comes first. With
    `missing` a checkpoint that has an evaluation with these settings is not evaluated again. The
    remaining ranks are data parallel. Checksums of checkpoints are verified unless `verify` is
    False. With `context_gain` also the loss of the last tokens by the tokens that are read
    (`eval.loss.context_gain`). Files state the `command` that was typed and the
    `commit` of its code.
    """
    folder = Path(run)
    asked = Prompts(tuple(sorted(passkey_lengths or lengths)), tuple(depths), trials)
    with parallel_ranks(
        tensor_parallel, context_parallel, device, pipeline_parallel=pipeline_parallel
    ):
        manifest = Manifest.load(store)
        longest = max(lengths)
        chosen = held_out_in_turn(manifest, longest + 1, documents)
        texts = [text for _, text in chosen]
        sources = tuple(source for source, _ in chosen) if len(manifest.sources) > 1 else ()
        hay = held_out(manifest, max(asked.lengths), len(asked.depths)) if trials else []
        shortest = min(lengths)
        brief = short_documents(manifest, shortest)
        counts = token_counts(manifest) if context_gain else None
        settings = Settings(
            longest, len(texts), trials, store,
            asked.lengths if trials else (), asked.depths if trials else (),
            PROMPT_VERSION if trials else 0, sources, manifest.first_tokens,
        )  # fmt: skip
        asked_of_all = {
            "settings": settings, "lengths": sorted(lengths), "device": device, "commit": commit,
            "store": digest(manifest.root / MANIFEST), "tokenizer": manifest.tokenizer.fingerprint,
            "tensor_parallel": tensor_parallel, "context_parallel": context_parallel,
            "pipeline_parallel": pipeline_parallel, "verify": verify,
        }  # fmt: skip
        unfinished: list[FinishedParts] = []
        for subject in subjects(folder, stages, base=base):
            asked_for = (subject.name, settings, subject.step, sorted(lengths))
            record = subject.record(folder)
            if missing and evaluated_with(
                folder, *asked_for, record, context_gain=context_gain, short=bool(brief)
            ):
                if dist.get_rank() == 0:
                    partial_path(folder, subject.name).unlink(missing_ok=True)
                    if record is not None:
                        write_record(folder, subject.name, record)
                continue
            parts = FinishedParts(folder, subject.name, asked_of_all | subject.identity())
            unfinished.append(parts)
            model = subject.loading(
                max((longest, *settings.prompt_lengths)), bf16=device == "cuda", verify=verify
            )
            parameters, rotation = size_of(parts, model), rotation_in(parts, model, subject.context)
            first = manifest.first_tokens
            losses = losses_of(parts, model, texts, longest, first)
            gained = None
            if counts is not None:
                gained = gain_of(parts, model, texts, longest, sources, counts, first)
            short = short_of(parts, model, brief, shortest) if brief else None
            grid = passkey_grid(parts, model, manifest, hay, asked) if trials else None
            if dist.get_rank() == 0:
                found = evaluation(subject, record, losses, sorted(lengths), grid, store)
                same = {name: asked_of_all[name] for name in ("store", "tokenizer", "device")}
                found = replace(
                    found, sources=sources, first_tokens=first, identity=identity_of(subject, same)
                )
                about = Provenance(
                    date=now(),
                    commit=commit,
                    command=command,
                    seeds={"windows": WINDOW_SEED} | ({"passkeys": PASSKEY_SEED} if trials else {}),
                    tokenizer=f"{manifest.tokenizer.name} {manifest.tokenizer.fingerprint[:SHORT]}",
                    parameters=parameters,
                    rotation=rotation,
                    tokens_seen=0 if subject.base else tokens_seen(folder, subject.name),
                )
                write_evaluation(
                    folder, replace(found, context_gain=gained, provenance=about, short=short)
                )
        for parts in unfinished:
            parts.remove()


@dataclass(frozen=True)
class Subject:
    """What is evaluated: the newest checkpoint of a stage, or its base model."""

    name: str
    stage: Path
    context: int
    step: int
    base: BaseModel | None = None

    def record(self, run: Path) -> BaseRecord | None:
        """Return what an evaluation states of a base model; None for a stage.

        Its stages are those of this command, and those of earlier ones that compared with the same.
        """
        if self.base is None:
            return None
        own = BaseRecord(str(self.base.checkpoint), self.base.rope.to_dict(), self.base.stages)
        return own.with_stages_of(base_record(run, self.name))

    @property
    def checkpoint(self) -> Path:
        """The weights that are evaluated; raise ValueError if there are none."""
        if self.base is not None:
            return self.base.checkpoint
        newest = newest_checkpoint(self.stage / "checkpoints")
        if newest is None:
            raise ValueError(f"{self.stage} has no complete checkpoint; train the stage first")
        return newest

    def identity(self) -> dict[str, Any]:
        """Return what tells this model from others: digests of its weights and of its recipe."""
        return {
            "weights": digest(self.checkpoint / MARKER),
            "recipe": digest(self.stage / RECIPE),
            "rope": None if self.base is None else self.base.rope.to_dict(),
        }

    def loading(self, seq_length: int, *, bf16: bool, verify: bool) -> Load:
        """Return what loads the model once, for up to `seq_length` tokens."""
        return cache(
            lambda: load_model.load(
                self.stage,
                seq_length=seq_length,
                bf16=bf16,
                verify=verify,
                start=self.checkpoint,
                rope=None if self.base is None else self.base.rope,
            )
        )


def identity_of(subject: Subject, measured_on: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all that tells a model and its documents from others."""
    of = json.dumps({**subject.identity(), **measured_on}, sort_keys=True)
    return sha256(of.encode()).hexdigest()


def losses_of(
    parts: FinishedParts, model: Load, texts: list[NDArray[np.int64]], length: int, first: int
) -> NDArray[np.float64]:
    """Return the loss by position as `loss_by_position` does."""
    rows = parts.part(
        "loss by position",
        list[list[Number]],
        lambda: loss_by_position(model(), texts, length, first).tolist(),
    )
    return np.array(rows, dtype=np.float64)


def gain_of(
    parts: FinishedParts,
    model: Load,
    texts: list[NDArray[np.int64]],
    length: int,
    sources: Sequence[str],
    counts: NDArray[np.int64],
    first: int,
) -> ContextGain:
    """Return the gain from context as `context_gain` does."""
    found = parts.part(
        "gain from context",
        ContextGain,
        lambda: context_gains.context_gain(model(), texts, length, sources, counts, first),
    )
    return cast(ContextGain, found)


def short_of(
    parts: FinishedParts, model: Load, brief: list[NDArray[np.int64]], length: int
) -> ShortLoss:
    """Return the loss of short documents as `short_loss` does."""
    found = parts.part(
        "loss of short documents", ShortLoss, lambda: short_loss(model(), brief, length)
    )
    return cast(ShortLoss, found)


def size_of(parts: FinishedParts, model: Load) -> int:
    """Return the parameters of the model."""
    return int(parts.part("number of parameters", int, lambda: parameters_of(model())))


def rotation_in(parts: FinishedParts, model: Load, context: int) -> dict[str, Any]:
    """Return the rotation in effect of the built model, for sequences of a context."""
    found = parts.part(
        "rotation in effect", dict[str, Any], lambda: rotation_of(model(), context).summary()
    )
    return cast(dict[str, Any], found)


def subjects(run: Path, stages: Sequence[str], *, base: bool) -> Iterator[Subject]:
    """Yield the base models of stages if asked for, and then the stages."""
    for model in base_models(run, stages) if base else ():
        yield Subject(model.name, model.stage, model.context, steps_taken(model.checkpoint), model)
    for name in stages:
        folder = stage_folder(run, name)
        record = read_stage(run, name)
        if record is None:
            raise ValueError(f"{folder} has no stage.json, which says what was trained")
        yield Subject(name, folder, record.context, steps_taken(folder / "checkpoints"))


def evaluation(
    subject: Subject,
    record: BaseRecord | None,
    losses: NDArray[np.float64],
    lengths: Sequence[int],
    grid: Passkey | None,
    store: str,
) -> Evaluation:
    """Return the evaluation of one subject; `losses` are by document and bucket of positions.

    `record` is `Subject.record`.
    """
    documents, longest = len(losses), max(lengths)
    means = losses.mean(0).tolist()
    return Evaluation(
        stage=subject.name,
        seq_length=subject.context,
        eval_length=longest,
        documents=documents,
        tokens=documents * longest,
        by_position=ByPosition(
            edges=tuple(range(0, longest + 1, BUCKET)),
            loss=tuple(means),
            tokens=(documents * BUCKET,) * len(means),
            bands=position_bands(losses, (subject.context, *lengths)),
        ),
        ranges=tuple(
            range_mean(losses, start, stop) for start, stop in pairwise([0, *sorted(lengths)])
        ),
        passkey=grid,
        store=store,
        step=subject.step,
        base=record,
    )


def range_mean(losses: NDArray[np.float64], start: int, stop: int) -> RangeMean:
    """Return the mean over a range of positions with its standard error over documents."""
    by_document = [mean_over(row, start, stop) for row in losses.tolist()]
    return RangeMean(
        start=start,
        stop=stop,
        loss=mean_over(losses.mean(0).tolist(), start, stop),
        tokens=len(losses) * (stop - start),
        standard_error=standard_error(by_document),
        by_document=tuple(by_document),
    )
