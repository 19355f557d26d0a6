# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of our recipe and of NeMo's own on one CPU rank: time and bytes.

    python -m benchmarks.step_beside_nemo

Claim: with equal options, ours takes at most 1.02 of NeMo's time and no more bytes.

A small Llama without Transformer Engine is trained from the same weights on the same tokens by
`llm.pretrain`, fp32, one rank: by NeMo's recipe, by ours with plain options, and by ours with what
the shipped recipes for long contexts choose (`benchmarks.nemo_recipes`). First all must find the
loss and the gradient norm of the first contestant in three steps. Then they take turns: in a round
each takes a few steps, and the first of a round is the last of the next. A step is whole: data,
callbacks, logs and optimizer are part of it (`benchmarks.harness.paced_training`). Times are
medians over all steps, and a ratio is the median over rounds of the ratio of a round's medians.

Bytes are those of live tensors at the worst moment of a step, weights, gradients and optimizer
included, counted in a run of its own (`custom_modules.profiling.memory_by_category`).

At the size `small` the overheads of a step show, at `large` its computation.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import facts
from benchmarks.harness.paced_training import CAUSES, Held, PacedTraining, Step
from benchmarks.harness.page import mebibytes, milliseconds, page, table, write
from custom_modules.memory.config import Recompute, Tiling
from custom_modules.profiling.categories import CATEGORIES
from custom_modules.rope.config import RopeScaling
from data.synthetic import prepare_made_up
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Cosine, Stage

MOST_TIME, MOST_BYTES = 1.02, 1.0
"""Of NeMo's, that the claim allows."""
TOLERANCE = 1e-5
"""Of loss and gradient norm, relative: rounding of fp32."""
FIRST_STEPS = 3
"""Steps that are compared and not timed."""
TOKENIZER = 512
"""Tokens of the tokenizer; a model may have more."""
TILE = 1024
"""Tokens of a tile of loss and MLP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A Llama, its batch, and the steps of a turn."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    sequences: int
    """Of a step, each a micro-batch."""
    turn: int

    @property
    def card(self) -> ModelCard:
        """The model."""
        return ModelCard(
            name="llama",
            layers=self.layers,
            hidden=self.hidden,
            ffn_hidden=self.ffn,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            vocab=self.vocab,
            tied_embeddings=False,
            norm_epsilon=1e-5,
            init_std=0.02,
            native_context=self.seq,
            native_rope=RopeScaling.base_change(10_000),
            hf_id=None,
            source="ours",
        )

    def stage(self, steps: int) -> Stage:
        """Return a stage of some steps from random weights."""
        batch = self.seq * self.sequences
        return Stage(
            seq_length=self.seq,
            rope="native",
            tokens=steps * batch,
            tokens_per_batch=batch,
            lr=Cosine(peak=1e-3),
            start="scratch",
        )

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, FFN {self.ffn}, {self.heads} heads and "
            f"{self.kv_heads} KV heads of {self.hidden // self.heads}, vocabulary {self.vocab:,}; "
            f"{self.sequences} x {self.seq:,} tokens a step, one sequence at a time"
        )


SIZES = {
    "small": Size(
        layers=2, hidden=128, ffn=384, heads=4, kv_heads=2, vocab=512, seq=512, sequences=4, turn=10
    ),
    "large": Size(
        layers=4, hidden=512, ffn=1536, heads=8, kv_heads=4, vocab=8192, seq=4096, sequences=1,
        turn=1,
    ),
}  # fmt: skip
MASKED, NEMO = "NeMo, Megatron's attention", "NeMo, PyTorch's attention"
RECOMPUTED = f"{NEMO}, full recompute"
PLAIN, LONG = "ours", "ours, kept attention, tiled loss and MLP"
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    NEMO: ("nemo", {}),
    PLAIN: ("ours", {}),
    MASKED: ("nemo", {"torch_attention": False}),
    RECOMPUTED: ("nemo", {"full_recompute": True}),
    LONG: (
        "ours",
        {
            "recompute": Recompute(kind="kept_attention"),
            "tiling": Tiling(loss=True, loss_tile=TILE, mlp=True, mlp_tile=TILE),
        },
    ),
}
PAIRS = ((PLAIN, NEMO), (PLAIN, MASKED), (LONG, RECOMPUTED))
"""Ours, and the one of NeMo with equal options."""


@dataclass(slots=True)
class Result:
    """What a contestant was found to take."""

    deviation: float = 0.0
    """Largest of loss and gradient norm in the first steps, relative to the first contestant's."""
    rounds: list[list[Step]] = field(default_factory=list)
    held: Held | None = None

    def median(self, what: str) -> float:
        """Return the median over all steps of a field of `Step`."""
        return statistics.median(getattr(step, what) for turn in self.rounds for step in turn)

    def cause(self, name: Any) -> float:
        """Return the median over all steps of a cause's seconds."""
        return statistics.median(step.causes[name] for turn in self.rounds for step in turn)


def build(who: str, *args: Any, **options: Any) -> partial[Any]:
    """Return the call of `llm.pretrain` of a contestant; NeMo is imported only where it trains."""
    from benchmarks import nemo_recipes

    made: partial[Any] = getattr(nemo_recipes, who)(*args, **options)
    return made


def measured(size: Size, rounds: int, threads: int, folder: Path) -> dict[str, Result]:
    """Return what each contestant takes; raise RuntimeError if one computes something else."""
    store = folder / "store"
    prepare_made_up(store, vocab_size=TOKENIZER)
    steps = FIRST_STEPS + rounds * size.turn + 1
    results = {name: Result() for name in CONTESTANTS}

    def training(name: str, run: str) -> PacedTraining:
        who, options = CONTESTANTS[name]
        place = folder / f"{list(CONTESTANTS).index(name)}_{run}"
        place.mkdir()
        make = partial(
            build, who, size.card, size.stage(steps), store=store, folder=place, **options
        )
        return PacedTraining(make, place / "output.log", threads=threads)

    with ExitStack() as stack:
        trainings = {name: training(name, "timed") for name in CONTESTANTS}
        first: list[Step] = []
        for name, one in trainings.items():
            stack.enter_context(one).start()
            taken = one.steps(FIRST_STEPS)
            first = first or taken
            results[name].deviation = _deviation(name, taken, first)
        names = list(CONTESTANTS)
        for turn in range(rounds):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                results[name].rounds.append(trainings[name].steps(size.turn))
    for name, result in results.items():
        with training(name, "counted") as counted:
            result.held = counted.held()
    return results


def _deviation(name: str, taken: Sequence[Step], right: Sequence[Step]) -> float:
    off = max(
        abs(getattr(mine, what) / getattr(theirs, what) - 1)
        for mine, theirs in zip(taken, right, strict=True)
        for what in ("loss", "gradient_norm")
    )
    if not off <= TOLERANCE:
        raise RuntimeError(f"{name} computes something else: off by {off:.1e} in its first steps")
    return off


def section(name: str, size: Size, results: dict[str, Result]) -> str:
    """Return the tables of one size: times, ratios, seconds by cause, bytes by category."""
    of_steps = [
        [
            who, "", milliseconds(one.median("seconds")), milliseconds(one.median("cpu_seconds")),
            mebibytes(_held(one).peak_bytes), _held(one).peak_in, f"{one.deviation:.0e}",
        ]
        for who, one in results.items()
    ]  # fmt: skip
    ratios = [[mine, theirs, *_ratios(results[mine], results[theirs])] for mine, theirs in PAIRS]
    causes = [
        [who, "", *(f"{one.cause(cause) * 1e3:,.2f}" for cause in CAUSES)]
        for who, one in results.items()
    ]
    categories = [
        category for category in CATEGORIES
        if any(_held(one).at_peak[category] for one in results.values())
    ]  # fmt: skip
    held = [
        [who, "", *(mebibytes(_held(one).at_peak[category]) for category in categories)]
        for who, one in results.items()
    ]
    return "\n\n".join(
        [
            f"## {name}",
            f"{size}.",
            table(["training", "", "ms", "CPU ms", "peak MiB", "peak in", "deviation"], of_steps),
            table(["ours", "over", "time", "of rounds", "CPU time", "bytes", "claim"], ratios),
            "Milliseconds of a step by cause:",
            table(["training", "", *CAUSES], causes),
            "MiB at the peak by category:",
            table(["training", "", *categories], held),
        ]
    )


def _held(result: Result) -> Held:
    assert result.held is not None
    return result.held


def _ratios(ours: Result, theirs: Result) -> list[str]:
    time, cpu = (_of_rounds(ours, theirs, what) for what in ("seconds", "cpu_seconds"))
    ratio, size = statistics.median(time), _held(ours).peak_bytes / _held(theirs).peak_bytes
    missed = ["slower"] * (ratio > MOST_TIME) + ["heavier"] * (size > MOST_BYTES)
    return [
        f"{ratio:.3f}", f"{min(time):.3f} to {max(time):.3f}", f"{statistics.median(cpu):.3f}",
        f"{size:.3f}", " and ".join(missed) or "holds",
    ]  # fmt: skip


def _of_rounds(ours: Result, theirs: Result, what: str) -> list[float]:
    """Return the ratio of the medians of each round."""
    medians = (
        [statistics.median(getattr(step, what) for step in turn) for turn in one.rounds]
        for one in (ours, theirs)
    )
    return [mine / other for mine, other in zip(*medians, strict=True)]


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_beside_nemo",
        description="Whole training steps of our recipe and of NeMo's own, on CPU.",
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", type=int, help="of a sequence, in place of the size's own")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; it must be at least 1")
    load = os.getloadavg()[0]
    sections = [
        f"fp32, one gloo rank, {given.threads} threads; medians of {given.rounds} rounds of a few "
        f"steps each. Tiles of {TILE:,} tokens. The claim holds for ours at {MOST_TIME} of the "
        f"time and {MOST_BYTES} of the bytes."
    ]
    for name in given.sizes:
        size = SIZES[name] if given.tokens is None else replace(SIZES[name], seq=given.tokens)
        with tempfile.TemporaryDirectory() as folder:
            results = measured(size, given.rounds, given.threads, Path(folder))
        sections.append(section(name, size, results))
        busy = f"{load:.1f} running at the start, {os.getloadavg()[0]:.1f} at the end"
        text = page(
            "A training step of our recipe compared with NeMo's own",
            facts(["nemo-toolkit", "megatron-core", "lightning"]) | {"load": busy},
            sections,
        )
        if given.out is not None:  # what is measured so far
            write(given.out, text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
