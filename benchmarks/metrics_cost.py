# SPDX-License-Identifier: Apache-2.0
"""Cost of the metrics of a step: the same training with and without them, in turns.

    python -m benchmarks.metrics_cost

Claim: the metrics take at most 1% of a step, and change no loss.

The tiny model is trained on one CPU rank, and every second step has all that
`custom_modules.callbacks.step_measures` measures (seconds by part, loss by position and by source,
documents, memory by rank, MFU); the others have a step log of loss, rate, tokens and time. Both
kinds of step are of one process: two processes that do the same differ by some 3% on CPU, by where
their memory lies. A step is whole, from its start to that of the next, with the writing of its
line, and is compared with the one before it. On a busy machine the ratio of CPU times is what the
claim is about: the clock's has what others do in it. The first pairs are left out, since they have
first calls in them. A second training, without metrics in any step, must have the same losses and
gradient norms.
"""

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from os import getloadavg
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks.evaluation_while_training import stage_of
from benchmarks.harness.machine import facts
from benchmarks.harness.paced_training import CAUSES, PacedTraining, Step
from benchmarks.harness.page import milliseconds, page, table, write
from custom_modules.callbacks.step_log import StepLog
from data.synthetic import prepare_made_up
from recipes.models import TINY
from recipes.spec.stage import Stage

MOST_RATIO = 1.01
"""Of a step with metrics to one without, that the claim allows."""
WITHOUT, WITH = "without", "with"
FIRST = 4
"""Pairs of steps that are left out."""
EQUAL = 8
"""Steps whose losses are compared with those of a training without metrics."""


class SwitchedStepLog(StepLog):
    """The step log with measures in every second step; in none if `never`."""

    never = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure as the step log does, and note what it is."""
        if not self.never:
            super().on_fit_start(trainer, pl_module)
        self.all_measures = self.measures

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Switch the measures on or off, and begin the step."""
        measures = self.all_measures if trainer.global_step % 2 else None
        timers = None if measures is None else measures.timers
        pl_module.config.timers = timers
        pl_module.optim.config.timers = timers
        pl_module.training_loss_reduction.bins = None if measures is None else measures.bins
        self.measures = measures
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End what measures, whichever step was the last."""
        self.measures = self.all_measures
        super().teardown(trainer, pl_module, stage)


class PlainStepLog(SwitchedStepLog):
    """The step log without measures in any step."""

    never = True


def build(stage: Stage, store: Path, folder: Path, *, log: type[SwitchedStepLog]) -> partial[Any]:
    """Return the call of `llm.pretrain` with this step log."""
    from benchmarks.nemo_recipes import ours

    pretrain = ours(TINY, stage, store=store, folder=folder)
    callbacks = pretrain.keywords["trainer"].callbacks
    for at, callback in enumerate(callbacks):
        if isinstance(callback, StepLog):
            callbacks[at] = log(
                str(callback.path), callback.tokens_per_batch, callback.seq_length,
                callback.flops_per_token,
            )  # fmt: skip
    return pretrain


def measured(
    stage: Stage, given: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[Step]], dict[str, int]]:
    """Return the steps of both kinds, and the bytes of their last lines.

    Raises RuntimeError if a training without metrics has other losses, or a line is not of its
    kind.
    """
    store = folder / "store"
    prepare_made_up(store, vocab_size=TINY.vocab)
    steps = {}
    for name, log, number in (
        ("plain", PlainStepLog, EQUAL),
        ("switched", SwitchedStepLog, 2 * (FIRST + given.pairs)),
    ):
        (folder / name).mkdir()
        make = partial(build, stage, store=store, folder=folder / name, log=log)
        with PacedTraining(make, folder / f"{name}.log", threads=given.threads) as training:
            training.start()
            steps[name] = training.steps(number)
    for ours, plain in zip(steps["switched"], steps["plain"], strict=False):
        if (ours.loss, ours.gradient_norm) != (plain.loss, plain.gradient_norm):
            raise RuntimeError(f"a loss is {ours.loss} with metrics and {plain.loss} without")
    lines = next((folder / "switched").glob("stages/*/metrics.jsonl")).read_text().splitlines()
    of_kinds = {WITHOUT: lines[0::2], WITH: lines[1::2]}
    for name, of_kind in of_kinds.items():
        if any(("mfu_6n" in json.loads(line)) != (name == WITH) for line in of_kind):
            raise RuntimeError(f"a line of a step {name} metrics is of the other kind")
    return (
        {WITHOUT: steps["switched"][0::2][FIRST:], WITH: steps["switched"][1::2][FIRST:]},
        {name: len(of_kind[-1]) for name, of_kind in of_kinds.items()},
    )


def sections(
    stage: Stage, given: argparse.Namespace, steps: dict[str, list[Step]], lines: dict[str, int]
) -> list[str]:
    """Return the tables: steps, their ratios, and the milliseconds by cause."""
    rows = [
        [
            name, "", f"{len(each):,}",
            milliseconds(statistics.median(step.seconds for step in each)),
            milliseconds(statistics.median(step.cpu_seconds for step in each)), f"{lines[name]:,}",
        ]
        for name, each in steps.items()
    ]  # fmt: skip
    pairs = list(zip(steps[WITH], steps[WITHOUT], strict=True))
    ratios = []
    for word, what in (("clock", "seconds"), ("CPU", "cpu_seconds")):
        each = sorted(getattr(ours, what) / getattr(plain, what) for ours, plain in pairs)
        quarter = len(each) // 4
        middle = statistics.median(each)
        ratios.append(
            [word, "", f"{middle:.4f}", f"{each[quarter]:.3f} to {each[-1 - quarter]:.3f}",
             "holds" if middle <= MOST_RATIO else "does not hold"]
        )  # fmt: skip
    causes = [
        [
            cause, "", *(milliseconds(statistics.median(step.causes[cause] for step in steps[name]))
                         for name in steps),
            milliseconds(
                statistics.median(ours.causes[cause] - plain.causes[cause] for ours, plain in pairs)
            ),
        ]
        for cause in CAUSES
    ]  # fmt: skip
    return [
        f"The tiny model, fp32, one gloo rank, {given.threads} threads; {stage.seq_length:,} "
        f"tokens a sequence, {stage.sequences_per_batch} sequences a step; {2 * given.pairs} steps "
        f"in turn without and with metrics, after {2 * FIRST} that are left out. The first {EQUAL} "
        "losses and gradient norms are those of a training without metrics.",
        table(["metrics", "", "steps", "ms", "CPU ms", "bytes of a line"], rows),
        f"With metrics over the step before, without (claim: at most {MOST_RATIO}):",
        table(["time", "", "median of pairs", "middle half of pairs", "claim"], ratios),
        "Milliseconds by cause, and the median of the differences of pairs:",
        table(["cause", "", *steps, "difference"], causes),
    ]


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics_cost",
        description="The tiny model trained with and without the metrics of a step, in turns.",
    )
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="of a step")
    parser.add_argument("--pairs", type=int, default=250, help="of steps without and with metrics")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    for name, least in {"seq": 1, "sequences": 1, "pairs": 4, "threads": 1}.items():
        if getattr(given, name) < least:
            parser.error(f"--{name} is {getattr(given, name)}; it must be at least {least}")
    load = getloadavg()[0]
    stage = stage_of(given.seq, given.sequences, 2 * (FIRST + given.pairs) + 1)
    with tempfile.TemporaryDirectory() as folder:
        steps, lines = measured(stage, given, Path(folder))
    busy = f"{load:.1f} running at the start, {getloadavg()[0]:.1f} at the end"
    text = page(
        "Cost of the metrics of a step",
        facts(["nemo-toolkit", "megatron-core", "lightning"]) | {"load": busy},
        sections(stage, given, steps, lines),
    )
    if given.out is not None:
        write(given.out, text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
