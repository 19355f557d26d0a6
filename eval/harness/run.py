# SPDX-License-Identifier: Apache-2.0
"""Evaluate models on tasks of lm-evaluation-harness, on every rank of a torchrun job.

`longhaul evaluate --suite` launches it. Each task, and each length of a task that makes its
prompts, is one call of the harness and one result file (`eval.suite_results`).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.store import tokenizer_fingerprint
from eval import load_model
from eval.answers.end_tokens import end_tokens
from eval.distributed import parallel_ranks
from eval.evaluate import Subject, subjects
from eval.harness.guards import without_code_of_others
from eval.harness.model import Export, Megatron, RefusesOverlong
from eval.harness.tasks import (
    PREFIX_ROOM,
    SuiteTask,
    built,
    find,
    harness_version,
    require_few_shot,
    template_sha256,
    tokenizer_in,
)
from eval.suite_results import (
    Metric,
    SuiteResult,
    SuiteSettings,
    read_result,
    write_result,
)
from recipes.checkpoints.marker import MARKER, newest_checkpoint
from recipes.hugging_face.folder_facts import folder_facts
from recipes.hugging_face.source_checkpoint import published_folder

NOT_SCORES = ("alias", "name", "sample_len", "sample_count")


@dataclass(frozen=True)
class Suite:
    """What is asked for: tasks or groups by name, their samples, and lengths of made prompts."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    limit: int | None = None
    include: Path | None = None
    few_shot: int | None = None
    chat_template: bool = False
    """Whether the tokenizer's chat template writes the prompts."""


@dataclass(frozen=True)
class Evaluated:
    """A model to evaluate, as result files describe it; `model` loads it for N tokens."""

    name: str
    weights: Path
    step: int | None
    context: int
    digest: str
    tokenizer: Path
    backend: str
    precision: str
    model: Callable[[int], RefusesOverlong]
    published: Path | None = None
    """Folder with the model's generation_config.json."""


def evaluate_stages(
    run: str,
    stages: list[str],
    tokenizer: str,
    suites: Sequence[str],
    lengths: Sequence[int],
    limit: int | None = None,
    include: str = "",
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
    base: bool = False,
    few_shot: int | None = None,
    chat_template: bool = False,
) -> None:
    """Write the results of stages; the remaining ranks are data parallel and share out requests.

    With `base` the base model of the stages comes first, as in `eval.evaluate`.
    """
    with parallel_ranks(tensor_parallel, context_parallel, device):
        asked = _suite(suites, lengths, limit, include, few_shot, chat_template)
        folder = Path(run)
        models = [
            of_checkpoint(subject, Path(tokenizer), device, verify)
            for subject in subjects(folder, stages, base=base)
        ]
        evaluate_models(folder, models, asked)


def evaluate_export(
    run: str,
    export: str,
    suites: Sequence[str],
    lengths: Sequence[int],
    limit: int | None = None,
    include: str = "",
    device: str = "cpu",
    few_shot: int | None = None,
    chat_template: bool = False,
) -> None:
    """Write the results of an export, a Hugging Face folder, through the harness's type `hf`."""
    with parallel_ranks(1, 1, device):
        asked = _suite(suites, lengths, limit, include, few_shot, chat_template)
        evaluate_models(Path(run), [of_export(Path(export), device)], asked)


def evaluate_models(run: Path, models: Sequence[Evaluated], asked: Suite) -> None:
    """Evaluate each model on each task and length that has no result with the same settings."""
    tasks, _, manager = find(asked.names, asked.include)
    require_few_shot(tasks, asked.few_shot)
    for model in models:
        left = [
            (task, settings)
            for task, settings in tasks_left(tasks, model, asked)
            if not _evaluated_before(run, model.name, settings)
        ]
        if not left:
            continue
        lm = model.model(max(settings.longest for _, settings in left))
        for task, settings in left:
            lm.longest, lm.most, lm.other_ends = settings.longest, 0, settings.other_end_tokens
            result = evaluated(lm, task, manager, model, settings)
            if result is not None:
                write_result(run, result)


def tasks_left(
    tasks: Sequence[SuiteTask], model: Evaluated, asked: Suite
) -> Iterator[tuple[SuiteTask, SuiteSettings]]:
    """Yield each task with the settings of its result, at each length if it makes its prompts."""
    version, fingerprint = harness_version(), tokenizer_fingerprint(model.tokenizer)
    template = template_sha256(model.tokenizer) if asked.chat_template else ""
    ends = end_tokens(tokenizer_in(model.tokenizer), model.published)
    for task in tasks:
        for length in asked.lengths if task.makes_prompts else (None,):
            longest = model.context if length is None else length + PREFIX_ROOM
            settings = SuiteSettings(
                task=task.name,
                task_sha256=task.digest,
                length=length,
                limit=asked.limit,
                longest=max(model.context, longest),
                weights_sha256=model.digest,
                tokenizer_sha256=fingerprint,
                backend=model.backend,
                precision=model.precision,
                harness=version,
                few_shot=asked.few_shot,
                chat_template=template,
                other_end_tokens=ends.after(by_template=asked.chat_template),
            )
            yield task, settings


def evaluated(
    lm: RefusesOverlong, task: SuiteTask, manager: Any, model: Evaluated, settings: SuiteSettings
) -> SuiteResult | None:
    """Return the result of one task on the first rank, None on others."""
    from lm_eval import simple_evaluate

    loaded = built(
        task,
        manager,
        tokenizer=model.tokenizer,
        length=settings.length,
        limit=settings.limit,
    )
    with without_code_of_others():  # a metric may load others when it is computed
        found = simple_evaluate(
            lm,
            tasks=[loaded],
            limit=settings.limit,
            num_fewshot=settings.few_shot,
            apply_chat_template=bool(settings.chat_template),
            fewshot_as_multiturn=bool(settings.chat_template),
            task_manager=manager,
            log_samples=False,
            batch_size=1,
        )
    if found is None or dist.get_rank() != 0:  # the harness has none where LOCAL_RANK is not 0
        return None
    better = found["higher_is_better"].get(task.name, {})
    counts = found["n-samples"][task.name]
    return SuiteResult(
        model=model.name,
        weights=str(model.weights),
        step=model.step,
        settings=settings,
        version=str(found["versions"].get(task.name)),
        few_shot=int(found["n-shot"].get(task.name) or 0),
        samples=int(counts["effective"]),
        available=int(counts["original"]),
        most_tokens=lm.most,
        metrics=tuple(_metrics(found["results"][task.name], better, settings.length)),
    )


def _metrics(
    scores: dict[str, Any], better: dict[str, bool | None], length: int | None
) -> Iterator[Metric]:
    """Yield the scores of a task, without those of other lengths, which are -1."""
    for key, value in scores.items():
        name, _, of_filter = key.partition(",")
        if key in NOT_SCORES or name.endswith("_stderr"):
            continue
        if length is not None and name.isdigit() and int(name) != length:
            continue
        error = scores.get(f"{name}_stderr,{of_filter}")
        yield Metric(
            name=name,
            filter=of_filter,
            value=float(value),
            standard_error=float(error) if isinstance(error, int | float) else float("nan"),
            higher_is_better=better.get(name),
        )


def of_checkpoint(subject: Subject, tokenizer: Path, device: str, verify: bool) -> Evaluated:
    """Return a stage, or the base model with its rotation, as a model to evaluate."""
    base = subject.base
    checkpoint = base.checkpoint if base else newest_checkpoint(subject.stage / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{subject.stage} has no complete checkpoint; train the stage first")
    facts = (checkpoint / MARKER).read_bytes()
    if base is not None:
        facts += json.dumps(base.rope.to_dict(), sort_keys=True).encode()

    def model(longest: int) -> Megatron:
        loaded = load_model.load(
            subject.stage,
            seq_length=longest,
            bf16=device == "cuda",
            verify=verify,
            start=None if base is None else base.checkpoint,
            rope=None if base is None else base.rope,
        )
        return Megatron(loaded, tokenizer_in(tokenizer), longest=longest)

    return Evaluated(
        name=subject.name,
        weights=checkpoint,
        step=subject.step,
        context=subject.context,
        digest=hashlib.sha256(facts).hexdigest(),
        tokenizer=tokenizer,
        backend="megatron",
        precision="bf16" if device == "cuda" else "fp32",
        model=model,
        published=published_folder(checkpoint),
    )


def of_export(folder: Path, device: str) -> Evaluated:
    """Return an export, or another Hugging Face folder, as a model to evaluate."""
    facts = folder_facts(folder)
    return Evaluated(
        name=folder.resolve().name,
        weights=folder.resolve(),
        step=None,
        context=facts.context,
        digest=facts.digest,
        tokenizer=folder,
        backend="hf",
        precision="bf16" if device == "cuda" else "fp32",
        model=lambda longest: Export(folder, longest=longest, device=device),
        published=folder,
    )


def _suite(
    names: Sequence[str],
    lengths: Sequence[int],
    limit: int | None,
    include: str,
    few_shot: int | None,
    chat_template: bool,
) -> Suite:
    folder = Path(include) if include else None
    return Suite(tuple(names), tuple(lengths), limit, folder, few_shot, chat_template)


def _evaluated_before(run: Path, model: str, settings: SuiteSettings) -> bool:
    """Return whether the first rank finds a result; others may see a file that it wrote later."""
    first = dist.get_rank() == 0
    found = [read_result(run, model, settings) is not None if first else False]
    dist.broadcast_object_list(found)
    return found[0]
