# SPDX-License-Identifier: Apache-2.0
"""Cost of evaluating a model while it trains: the same training with and without it, in turns.

    python -m benchmarks.evaluation_while_training

Claim: `--eval-every 0` takes at most 1% of the time of the steps, and changes no loss.

The tiny model is trained twice on one CPU rank, from the same seed on the same batches: *with*
evaluations spaced by their own time (`eval.while_training`), and *without*. Each is a process of
its own, which waits while the other takes a few steps (`benchmarks.harness.paced_training`), so
what else runs on a machine meets both. A step is whole, from its start to that of the next: an
evaluation is part of the step that it follows. All losses and gradient norms must be equal.

The share is what evaluations add over what steps take: by the clock as the training logs it
(`evaluation_seconds` and `seconds` of `metrics.jsonl`), and in CPU time of the process, as the CPU
time of the steps that are followed by an evaluation above the median of the others. The spacing
goes by the clock, so on a busy machine the first is what the claim is about, and the second what a
quiet one would show.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from os import getloadavg
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.machine import facts
from benchmarks.harness.paced_training import PacedTraining, Step
from benchmarks.harness.page import milliseconds, page, table, write
from custom_modules.rope.config import RopeScaling
from data.synthetic import prepare_made_up
from eval.run_folder import Step as Logged
from eval.run_folder import read_steps
from recipes.models import TINY
from recipes.spec.stage import Cosine, Stage

MOST_SHARE = 0.01
"""Of the time of the steps, that the claim allows."""
WITH, WITHOUT = "with", "without"


class Measured(NamedTuple):
    """One of the two trainings."""

    turns: list[list[Step]]
    logged: tuple[Logged, ...]
    """The lines of its `metrics.jsonl`."""

    @property
    def steps(self) -> list[Step]:
        """All steps."""
        return [step for turn in self.turns for step in turn]

    @property
    def followed(self) -> list[bool]:
        """Whether an evaluation follows each step."""
        return [logged.is_evaluated for logged in self.logged[: len(self.steps)]]

    def median(self, what: str) -> float:
        """Return the median of a field of the steps that no evaluation follows."""
        found = zip(self.steps, self.followed, strict=True)
        return statistics.median(getattr(step, what) for step, followed in found if not followed)

    def total(self, what: str) -> float:
        """Return the sum of a field over all steps."""
        return float(sum(getattr(step, what) for step in self.steps))

    @property
    def share_of_clock(self) -> float:
        """Return the time of evaluations over that of steps, as the training logs them."""
        spent = sum(each.evaluation_seconds for each in self.logged if each.is_evaluated)
        return float(spent / sum(each.seconds for each in self.logged))

    @property
    def share_of_cpu(self) -> float:
        """Return the CPU time that evaluations add, over that of the steps without them."""
        usual = self.median("cpu_seconds")
        found = zip(self.steps, self.followed, strict=True)
        added = sum(step.cpu_seconds - usual for step, followed in found if followed)
        return float(added / (self.total("cpu_seconds") - added))


def stage_of(seq: int, sequences: int, steps: int) -> Stage:
    """Return a stage of some steps from random weights."""
    batch = seq * sequences
    return Stage(
        seq_length=seq,
        rope=RopeScaling.yarn(base=10_000, factor=4.0, original_length=max(1, seq // 4)),
        tokens=steps * batch,
        tokens_per_batch=batch,
        lr=Cosine(peak=2e-3),
        start="scratch",
    )


def build(stage: Stage, store: Path, folder: Path, every: int | None) -> partial[Any]:
    """Return the call of `llm.pretrain`; with `every` the model is evaluated."""
    from benchmarks.nemo_recipes import ours
    from eval.while_training import WhileTraining

    pretrain = ours(TINY, stage, store=store, folder=folder)
    if every is not None:
        evaluations = WhileTraining(str(store), stage.seq_length, stage.tokens_per_batch, every)
        pretrain.keywords["trainer"].callbacks.append(evaluations)
    return pretrain


def measured(stage: Stage, given: argparse.Namespace, folder: Path) -> dict[str, Measured]:
    """Return both trainings; raise RuntimeError if their losses differ."""
    store = folder / "store"
    prepare_made_up(store, vocab_size=TINY.vocab)
    turns: dict[str, list[list[Step]]] = {WITHOUT: [], WITH: []}
    with ExitStack() as stack:
        trainings = {}
        for name in turns:
            place = folder / name
            place.mkdir()
            make = partial(
                build, stage, store=store, folder=place, every=given.every if name == WITH else None
            )
            log = place / "output.log"
            trainings[name] = stack.enter_context(PacedTraining(make, log, threads=given.threads))
            trainings[name].start()
        for _ in range(given.turns):
            for name, training in trainings.items():
                turns[name].append(training.steps(given.turn))
    found = {
        name: Measured(taken, read_steps(next((folder / name).glob("stages/*/metrics.jsonl"))))
        for name, taken in turns.items()
    }
    pairs = zip(found[WITH].steps, found[WITHOUT].steps, strict=True)
    for number, (one, other) in enumerate(pairs, 1):
        if (one.loss, one.gradient_norm) != (other.loss, other.gradient_norm):
            raise RuntimeError(
                f"step {number} has the loss {one.loss} with evaluations and {other.loss} without"
            )
    return found


def sections(stage: Stage, given: argparse.Namespace, found: dict[str, Measured]) -> list[str]:
    """Return the tables: steps, and evaluations."""
    rows = [
        [
            name, "", f"{len(one.steps):,}", str(sum(one.followed)),
            milliseconds(one.median("seconds")), milliseconds(one.median("cpu_seconds")),
            f"{one.total('seconds'):,.1f}", f"{one.total('cpu_seconds'):,.1f}",
        ]
        for name, one in found.items()
    ]  # fmt: skip
    ours, plain = found[WITH], found[WITHOUT]
    ratios = [
        [
            what, "", f"{ours.median(field) / plain.median(field):.4f}",
            f"{ours.total(field) / plain.total(field):.4f}", f"{share:.3%}",
            "holds" if share <= MOST_SHARE else "does not hold",
        ]
        for what, field, share in (
            ("clock", "seconds", ours.share_of_clock),
            ("CPU", "cpu_seconds", ours.share_of_cpu),
        )
    ]  # fmt: skip
    evaluations = [
        [
            f"{step.step:,}", "", f"{step.heldout_loss:.3f}",
            milliseconds(step.evaluation_seconds),
            f"{step.evaluation_seconds / ours.median('seconds'):.2f}",
        ]
        for step in ours.logged
        if step.is_evaluated
    ]  # fmt: skip
    often = "as often as takes 1% of the time" if given.every == 0 else f"every {given.every} steps"
    return [
        f"The tiny model, fp32, one gloo rank, {given.threads} threads; {stage.seq_length:,} "
        f"tokens a sequence, {stage.sequences_per_batch} sequences a step; {given.turns} turns of "
        f"{given.turn} steps each, evaluated {often}. Losses and gradient norms of all "
        f"{len(ours.steps):,} steps are equal. Medians are of steps that no evaluation follows; "
        "sums have all steps, also the first, which is slow.",
        table(
            ["training", "", "steps", "evaluations", "ms", "CPU ms", "s in all", "CPU s in all"],
            rows,
        ),
        "With evaluations over without, and the share of evaluations in the time of the steps "
        f"(claim: at most {MOST_SHARE:.0%}). Evaluations are spaced by the clock, by which a step "
        "takes longer than in CPU time where other processes run:",
        table(["time", "", "median step", "all steps", "share", "claim"], ratios),
        "Each evaluation:",
        table(["after step", "", "held-out loss", "ms", "steps' time"], evaluations),
    ]


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation_while_training",
        description="The tiny model trained with and without evaluations, in turns, on CPU.",
    )
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="of a step")
    parser.add_argument("--every", type=int, default=0, help="steps; 0: by their own time")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn", type=int, default=10, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    for name in ("seq", "sequences", "turns", "turn", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}; it must be at least 1")
    if given.every < 0:
        parser.error(f"--every is {given.every}; it must be at least 0")
    load = getloadavg()[0]
    stage = stage_of(given.seq, given.sequences, given.turns * given.turn + 1)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(stage, given, Path(folder))
    busy = f"{load:.1f} running at the start, {getloadavg()[0]:.1f} at the end"
    text = page(
        "Evaluating a model while it trains",
        facts(["nemo-toolkit", "megatron-core", "lightning"]) | {"load": busy},
        sections(stage, given, found),
    )
    if given.out is not None:
        write(given.out, text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
