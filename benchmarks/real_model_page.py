# SPDX-License-Identifier: Apache-2.0
"""The result page of a real model's run, from its files; `benchmarks.real_model` writes it."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table
from custom_modules.rope.config import RopeScaling
from data.store import Manifest
from data.token_files.held_out import long_documents
from eval.loss.loss_by_position import mean_over, windows
from eval.report.evaluations import in_words, range_bounds
from eval.report.gains import gains, pairs
from eval.report.short_tables import short_sentences
from eval.ruler.results import RulerResult, read_results
from eval.ruler.sources import OFFLINE
from eval.run_folder import (
    BUCKET,
    Evaluation,
    StageResults,
    base_evaluations,
    load,
    read_evaluation,
)
from eval.uncertainty import standard_error
from recipes.hugging_face.rope import rope_fields
from recipes.spec.naming import length_shown

PUBLISHED = Path("models/smollm2_135m_hf")
ANSWER = "answer.txt"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def page_of(run: Path, title: str, beside: str) -> str:
    """Return the page of a run."""
    _, stages = load(run)
    found = [read_evaluation(run, stage.name) for stage in stages]
    evaluations = [*base_evaluations(run), *(each for each in found if each is not None)]
    if not evaluations:
        sys.exit(f"{run} has no evaluation; run `make real`, or this command with --work")
    about = facts(["transformers", "nemo_toolkit", "megatron-core", "gguf"])
    sections = [
        *times_section(run),
        training_section(stages),
        loss_section(evaluations),
        gain_section(evaluations),
        passkey_section(evaluations),
        *context_section(evaluations),
        *short_section(evaluations),
        *ruler_section(read_results(run), [each.stage for each in evaluations]),
        transformers_section(evaluations),
        *answer_section(run),
    ]
    return page(
        title,
        {**about, "other work on the machine": beside, "evaluated on": in_words(evaluations[-1])},
        sections,
    )


def times_section(run: Path) -> Iterator[str]:
    """Yield the time of each step of the run."""
    file = run / "times.json"
    if not file.exists():
        return
    times = json.loads(file.read_text())
    rows = [
        [one["step"], f"{one['load']:.1f}", f"{one['seconds']:,.0f}", _cpu(one)] for one in times
    ]
    rows.append(["all", "-", f"{sum(one['seconds'] for one in times):,.0f}", "-"])
    head = ["step", "load at its end", "seconds", "CPU seconds"]
    yield "## Time by step\n\n" + table(head, rows)


def _cpu(one: dict[str, float]) -> str:
    return f"{one['cpu_seconds']:,.0f}" if "cpu_seconds" in one else "-"


def training_section(stages: Sequence[StageResults]) -> str:
    """Return what each stage trained."""
    rows = [
        [
            stage.name,
            "-" if stage.record is None else f"{stage.record.context:,}",
            f"{len(stage.steps)}",
            f"{sum(stage.step_tokens()):,.0f}",
            f"{sum(step.seconds for step in stage.steps):,.0f}",
            f"{stage.steps[0].loss:.3f}",
            f"{stage.steps[-1].loss:.3f}",
        ]
        for stage in stages
        if stage.steps
    ]
    head = ["stage", "context", "steps", "tokens", "seconds", "first loss", "last loss"]
    return "## Training\n\n" + table(head, rows)


def loss_section(evaluations: Sequence[Evaluation]) -> str:
    """Return mean losses by range of positions with their standard errors."""
    bounds = range_bounds(evaluations)
    rows = []
    for each in evaluations:
        means = {(mean.start, mean.stop): mean for mean in each.ranges}
        rows.append(
            [
                each.stage,
                rotation(each),
                *(
                    with_error(means[bound].loss, means[bound].standard_error)
                    if bound in means
                    else "-"
                    for bound in bounds
                ),
            ]
        )
    head = ["weights", "rotation", *(span(*bound) for bound in bounds)]
    return (
        "## Loss by position in the window, nats per token\n\nMean over documents and its standard "
        "error. Windows begin at random tokens of documents.\n\n" + table(head, rows)
    )


def rotation(evaluation: Evaluation) -> str:
    """Return in a word how the positions of an evaluation are rotated."""
    if evaluation.base is None:
        return "its own"
    rope = evaluation.base.rope
    factor = f" x{rope['factor']:g}" if "factor" in rope else ""
    return f"{rope['method']}{factor}"


def span(start: int, stop: int) -> str:
    """Return a range of positions in a word."""
    return f"{length_shown(start) if start else 0}-{length_shown(stop)}"


def gain_section(evaluations: Sequence[Evaluation]) -> str:
    """Return the differences of each stage to each base model, document by document."""
    bounds = range_bounds(evaluations)
    rows = []
    for base, stage in pairs(evaluations):
        by_bound = {(one.start, one.stop): one for one in gains(base, stage)}
        cells = (
            f"{by_bound[bound].difference:+.3f} {PLUS_MINUS} {by_bound[bound].standard_error:.3f}"
            if bound in by_bound
            else "-"
            for bound in bounds
        )
        rows.append([stage.stage, f"to {base.stage}", *cells])
    head = ["stage", "difference", *(span(*bound) for bound in bounds)]
    return (
        "## Differences from the base model, nats per token\n\nMean difference of a document and "
        "its standard error; negative is better.\n\n" + table(head, rows)
    )


def passkey_section(evaluations: Sequence[Evaluation]) -> str:
    """Return the passkeys found, with the loss of an answer token."""
    asked = [(each, each.passkey) for each in evaluations if each.passkey is not None]
    if not asked:
        return "## Passkeys\n\nNo prompt was tried."
    lengths = sorted({length for _, grid in asked for length in grid.lengths})
    rows = []
    for each, grid in asked:
        for at, depth in enumerate(grid.depths):
            cells = dict(zip(grid.lengths, zip(grid.hits, grid.nats, strict=True), strict=True))
            rows.append(
                [
                    each.stage,
                    f"{depth:.0%}",
                    *(
                        f"{round(cells[length][0][at] * grid.trials)}/{grid.trials} "
                        f"({cells[length][1][at]:.2f})"
                        if length in cells
                        else "-"
                        for length in lengths
                    ),
                ]
            )
    head = ["weights", "depth", *map(length_shown, lengths)]
    return (
        "## Passkeys found\n\nExact answers of those tried, by length of the prompt; in brackets "
        "the loss of an answer token, nats.\n\n" + table(head, rows)
    )


def context_section(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """Yield the loss of the last tokens by the tokens that are read, if it was measured."""
    measured = [(each.stage, each.context_gain) for each in evaluations if each.context_gain]
    if not measured:
        return
    first = measured[0][1]
    rows = []
    for name, gain in measured:
        if (gain.scored, gain.contexts) != (first.scored, first.contexts):
            sys.exit(f"{name} has other contexts than {measured[0][0]}; evaluate both again")
        gained = [row[0] - row[-1] for row in gain.by_document]
        cells = zip(gain.loss, gain.standard_error, strict=True)
        rows.append(
            [
                name,
                *(with_error(loss, error) for loss, error in cells),
                with_error(sum(gained) / len(gained), standard_error(gained)),
            ]
        )
    head = ["weights", *map(length_shown, first.contexts), "gain"]
    yield (
        f"## Gain from context, nats per token\n\nLoss of the last {first.scored:,} tokens of each "
        "window, by how many of the last tokens are read, and how much lower it is given the whole "
        "window than given the fewest.\n\n" + table(head, rows)
    )


def short_section(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """Yield the loss of whole short documents and its change, if it was measured."""
    rows = [
        [
            each.stage,
            f"{len(each.short.tokens)}",
            f"{each.short.length:,}",
            with_error(each.short.loss, each.short.standard_error),
        ]
        for each in evaluations
        if each.short
    ]
    if rows:
        head = ["weights", "documents", "tokens at most", "nats per token"]
        changes = "".join(f"\n* {sentence}" for sentence in short_sentences(evaluations))
        yield f"## Loss of short documents\n\n{table(head, rows)}\n{changes}"


def ruler_section(results: Sequence[RulerResult], order: Sequence[str]) -> Iterator[str]:
    """Yield the scores on RULER's samples, if answers were scored into the run."""
    scored = {each.model: each for each in results if each.scores.suite in (OFFLINE, "ruler")}
    if not scored:
        return
    models = sorted(scored, key=lambda name: order.index(name) if name in order else len(order))
    cells = {
        (name, row.task, row.length): f"{row.score:.0f} ({row.low:.0f} to {row.high:.0f})"
        for name in models
        for row in scored[name].scores.scores
    }
    asked = sorted({(task, length) for _, task, length in cells}, key=lambda each: each[::-1])
    rows = [
        [name, *(cells.get((name, task, length), "-") for task, length in asked)] for name in models
    ]
    head = ["weights", *(f"{task}, {length_shown(length)}" for task, length in asked)]
    counts = {row.samples for each in scored.values() for row in each.scores.scores}
    few = " and ".join(f"{count:,}" for count in sorted(counts))
    suites = " and ".join(sorted({each.scores.suite for each in scored.values()}))
    yield (
        f"## Scores on samples of {suites}\n\nPercent of the answers in the text that the model "
        f"generates, and an interval of 95%; {few} samples for each figure. Lengths above the "
        "context of the published weights are not asked of them.\n\n" + table(head, rows)
    )


def with_error(value: float, error: float) -> str:
    """Return a figure with its standard error."""
    return f"{value:.3f} {PLUS_MINUS} {error:.3f}"


def transformers_section(evaluations: Sequence[Evaluation]) -> str:
    """Return the losses of the first document by transformers, next to ours."""
    store = Manifest.load(evaluations[-1].store)
    length = evaluations[-1].eval_length
    document = next(long_documents(store, min_tokens=length + 1))
    [window] = windows([document], length)
    bounds = list(pairwise([0, *(mean.stop for mean in evaluations[-1].ranges)]))
    rows = []
    for each in evaluations:
        if each.base is None:
            continue
        theirs = transformers_losses(window.tolist(), RopeScaling.from_dict(each.base.rope))
        for name, losses in (
            ("transformers", [mean_over(theirs, *bound) for bound in bounds]),
            ("longhaul", [mean.by_document[0] for mean in each.ranges]),
        ):
            rows.append([each.stage, name, *(f"{loss:.4f}" for loss in losses)])
    head = ["weights", "computed by", *(span(*bound) for bound in bounds)]
    return (
        "## The same by transformers\n\nLoss of the first document, fp32, from the folder that was "
        "imported.\n\n" + table(head, rows)
    )


def answer_section(run: Path) -> Iterator[str]:
    """Yield what transformers generated from the export, if that was asked."""
    file = run / ANSWER
    if file.exists():
        yield f"## A sentence from the export, by transformers\n\n{file.read_text().strip()}"


def transformers_losses(tokens: Sequence[int], rope: RopeScaling) -> list[float]:
    """Return the mean loss of each bucket of positions that transformers computes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(PUBLISHED)
    fields = rope_fields(rope, head_dim=config.head_dim, length=config.max_position_embeddings)
    for name, value in fields.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(PUBLISHED, config=config, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        hidden = model.model(ids[:, :-1]).last_hidden_state[0]
        losses = torch.cat(
            [
                torch.nn.functional.cross_entropy(model.lm_head(part), labels, reduction="none")
                for part, labels in zip(hidden.split(1024), ids[0, 1:].split(1024), strict=True)
            ]
        )
    assert math.isfinite(float(losses.sum()))
    found: list[float] = losses.view(-1, BUCKET).mean(1).tolist()
    return found
