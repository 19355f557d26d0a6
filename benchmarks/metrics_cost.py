# SPDX-License-Identifier: Apache-2.0
"""Cost of the metrics of a step: the same training with and without them, in turns.

    python -m benchmarks.metrics_cost

Claim: the metrics take at most 1% of a step, and change no loss.

The tiny model is trained twice on one CPU rank, from the same seed on the same batches: *with* all
that `custom_modules.callbacks.step_measures` measures (seconds by part, loss by position and by
source, documents, memory by rank, MFU), and *without*: a step log of loss, rate, tokens and time.
Each is a process of its own, which waits while the other takes a few steps
(`benchmarks.harness.paced_training`), so what else runs on a machine meets both. A step is whole,
from its start to that of the next, with the writing of its line. All losses and gradient norms must
be equal. On a busy machine the ratio of CPU times is what the claim is about: the clock's has what
others do in it. The first turn is left out, since it has first calls in it.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from os import getloadavg
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks.evaluation_while_training import stage_of
from benchmarks.harness.machine import facts
from benchmarks.harness.paced_training import PacedTraining, Step
from benchmarks.harness.page import milliseconds, page, table, write
from custom_modules.callbacks.step_log import StepLog
from data.synthetic import prepare_made_up
from recipes.models import TINY
from recipes.spec.stage import Stage

MOST_RATIO = 1.01
"""Of a step with metrics to one without, that the claim allows."""
WITH, WITHOUT = "with", "without"


class PlainStepLog(StepLog):
    """The step log without measures."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure nothing."""


def build(stage: Stage, store: Path, folder: Path, *, metrics: bool) -> partial[Any]:
    """Return the call of `llm.pretrain`."""
    from benchmarks.nemo_recipes import ours

    pretrain = ours(TINY, stage, store=store, folder=folder)
    callbacks = pretrain.keywords["trainer"].callbacks
    for at, callback in enumerate(callbacks):
        if isinstance(callback, StepLog) and not metrics:
            callbacks[at] = PlainStepLog(
                str(callback.path), callback.tokens_per_batch, callback.seq_length,
                callback.flops_per_token,
            )  # fmt: skip
    return pretrain


def measured(
    stage: Stage, given: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[list[Step]]], dict[str, int]]:
    """Return the steps of both trainings by turn, and the bytes of their last lines.

    Raises RuntimeError if their losses differ.
    """
    store = folder / "store"
    prepare_made_up(store, vocab_size=TINY.vocab)
    turns: dict[str, list[list[Step]]] = {WITHOUT: [], WITH: []}
    with ExitStack() as stack:
        trainings = {}
        for name in turns:
            place = folder / name
            place.mkdir()
            make = partial(build, stage, store=store, folder=place, metrics=name == WITH)
            log = place / "output.log"
            trainings[name] = stack.enter_context(PacedTraining(make, log, threads=given.threads))
            trainings[name].start()
        for _ in range(given.turns):
            for name, training in trainings.items():
                turns[name].append(training.steps(given.turn))
    for ours, plain in zip(turns[WITH], turns[WITHOUT], strict=True):
        for one, other in zip(ours, plain, strict=True):
            if (one.loss, one.gradient_norm) != (other.loss, other.gradient_norm):
                raise RuntimeError(f"a loss is {one.loss} with metrics and {other.loss} without")
    lines = {
        name: next((folder / name).glob("stages/*/metrics.jsonl")).read_text().splitlines()[-1]
        for name in turns
    }
    return turns, {name: len(line) for name, line in lines.items()}


def sections(
    stage: Stage,
    given: argparse.Namespace,
    turns: dict[str, list[list[Step]]],
    lines: dict[str, int],
) -> list[str]:
    """Return the tables: steps, and their ratios."""
    counted = {name: [step for turn in each[1:] for step in turn] for name, each in turns.items()}
    medians = {
        (name, what): statistics.median(getattr(step, what) for step in steps)
        for name, steps in counted.items()
        for what in ("seconds", "cpu_seconds")
    }
    rows = [
        [
            name, "", f"{len(steps):,}", milliseconds(medians[name, "seconds"]),
            milliseconds(medians[name, "cpu_seconds"]), f"{lines[name]:,}",
        ]
        for name, steps in counted.items()
    ]  # fmt: skip
    ratios = []
    for word, what in (("clock", "seconds"), ("CPU", "cpu_seconds")):
        ratio = medians[WITH, what] / medians[WITHOUT, what]
        each = [
            statistics.median(getattr(step, what) for step in ours)
            / statistics.median(getattr(step, what) for step in plain)
            for ours, plain in zip(turns[WITH][1:], turns[WITHOUT][1:], strict=True)
        ]
        verdict = "holds" if ratio <= MOST_RATIO else "does not hold"
        ratios.append(
            [word, "", f"{ratio:.4f}", f"{statistics.median(each):.4f}",
             f"{min(each):.3f} to {max(each):.3f}", verdict]
        )  # fmt: skip
    return [
        f"The tiny model, fp32, one gloo rank, {given.threads} threads; {stage.seq_length:,} "
        f"tokens a sequence, {stage.sequences_per_batch} sequences a step; {given.turns} turns of "
        f"{given.turn} steps each, A B A B, the first turn left out. Losses and gradient norms are "
        "equal.",
        table(["metrics", "", "steps", "ms", "CPU ms", "bytes of a line"], rows),
        f"With metrics over without (claim: at most {MOST_RATIO}):",
        table(["time", "", "medians", "median of turns", "turns", "claim"], ratios),
    ]


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics_cost",
        description="The tiny model trained with and without the metrics of a step, in turns.",
    )
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="of a step")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--turn", type=int, default=10, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    for name, least in {"seq": 1, "sequences": 1, "turns": 2, "turn": 1, "threads": 1}.items():
        if getattr(given, name) < least:
            parser.error(f"--{name} is {getattr(given, name)}; it must be at least {least}")
    load = getloadavg()[0]
    stage = stage_of(given.seq, given.sequences, given.turns * given.turn + 1)
    with tempfile.TemporaryDirectory() as folder:
        turns, lines = measured(stage, given, Path(folder))
    busy = f"{load:.1f} running at the start, {getloadavg()[0]:.1f} at the end"
    text = page(
        "Cost of the metrics of a step",
        facts(["nemo-toolkit", "megatron-core", "lightning"]) | {"load": busy},
        sections(stage, given, turns, lines),
    )
    if given.out is not None:
        write(given.out, text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
