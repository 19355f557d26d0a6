# SPDX-License-Identifier: Apache-2.0
"""Whether best-fit rows and synthetic retrieval serve the tiny ladder, at the same budget.

    python -m benchmarks.tiny_retrieval --work FOLDER --shares 0 0.1 0.3

The tiny ladder is trained as it is (*present*: documents end to end, cut into rows), and once for
each share: the same card, steps, rates and seed, but rows are packed by best fit, attention stays
within a document, and synthetic retrieval documents (`data.long_range`) have that share of the
tokens. They are the evaluation's kind of document, several keys with numbers in real text and
`assert KEY == number` at the end, with other names, half a row to a row long, and no held-out text
in them. A share of 0 shows what packing does alone.

All are evaluated on the held-out documents of the standard library: loss by position, and passkeys
up to each stage's length. The error of a share of passkeys is that of a binomial, with one prompt
found and one not found added.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.prepare import HELDOUT_FRACTION, content_hash, prepare
from data.readers import documents
from data.store import Manifest
from eval.run_folder import Evaluation, read_evaluation
from eval.uncertainty import standard_error
from recipes.checkpoints.marker import is_finished
from recipes.ladders.tiny import TINY_LADDER
from recipes.models import TINY
from recipes.spec.naming import length_word, stage_folder
from recipes.spec.stage import Stage

SEED = 20_261_125
TIMES = 2
"""Tokens of each synthetic source, in those that the largest share takes: most are read once."""
TEXT = "text"
HELDOUT = 0.01
"""Held out from the mixed store, which only training reads."""
LENGTHS = [stage.seq_length for stage in TINY_LADDER.stages]
LAYOUTS = ("dp2", "ulysses2", "ulysses2")
"""Of the stages, on two CPU ranks."""
BOUNDS = (LENGTHS[0] // 2, *LENGTHS)
"""Ends of the ranges of positions, and lengths of the passkey prompts."""


def text_store(work: Path) -> Manifest:
    """Return the store of the standard library, with the tokenizer of all others."""
    place = work / TEXT
    if not place.exists():
        prepare(None, place, vocab_size=TINY.vocab)
    return Manifest.load(place)


def training_texts() -> Iterator[str]:
    """Yield the documents that are not held out, in the order of their hashes."""
    found = [(content_hash(text, 0), text) for text, _ in documents(None)]
    yield from (text for place, text in sorted(found) if place >= HELDOUT_FRACTION)


def mixed_store(texts: Iterator[str], share: float, stages: Sequence[Stage], work: Path) -> Path:
    """Return the store of the text and of one synthetic source a stage, enough for the share."""
    place = work / "mixed"
    if place.exists():
        return place
    text = work / "training.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    sources = {TEXT: str(text)}
    for stage in stages:
        length = stage.seq_length
        count = math.ceil(TIMES * share * stage.tokens / (3 * length // 4))
        sources[synthetic(stage)] = (
            f"synthetic:retrieval,form=code,keys=4,queries=4,length={length // 2}-{length},"
            f"documents={count},seed={SEED},filler={text}"
        )
    prepare(
        sources, place, tokenizer=str(work / TEXT / "tokenizer"), heldout_fraction=HELDOUT
    )  # fmt: skip
    return place


def synthetic(stage: Stage) -> str:
    """Return the name of a stage's source of retrieval documents."""
    return f"retrieval-{stage.seq_length}"


def mixed_ladder(share: float, work: Path) -> Path:
    """Write the tiny ladder with best-fit rows and a share of retrieval; return its file."""
    stages: list[dict[str, Any]] = []
    for stage in TINY_LADDER.stages:
        assert not isinstance(stage.rope, str)
        shares = [{"source": TEXT, "weight": 1 - share}]
        if share:
            shares.append({"source": synthetic(stage), "weight": share})
        stages.append(
            {
                "seq_length": stage.seq_length,
                "rope": stage.rope.to_dict(),
                "tokens": stage.tokens,
                "tokens_per_batch": stage.tokens_per_batch,
                "lr": {"peak": stage.lr.peak},
                "start": stage.start,
                "documents": "within",
                "mix": {"shares": shares},
            }
        )
    path = work / f"rows_{share:g}.yaml"
    name = f"rows{round(100 * share)}"
    path.write_text(yaml.safe_dump({"name": name, "cards": [TINY.name], "stages": stages}))
    return path


def longhaul(*words: str | Path) -> None:
    """Run a command of Longhaul; its output goes to this process's."""
    command = [sys.executable, "-c", "from longhaul.cli import main; main()", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def trained(ladder: str | Path, store: Path, run: Path, stages: int) -> Path:
    """Train the first stages of a ladder unless they have been; return the run."""
    for stage, layout in zip(TINY_LADDER.stages[:stages], LAYOUTS, strict=False):
        name = stage_of(run, stage.seq_length)
        if name is not None and is_finished(
            stage_folder(run, name) / "checkpoints", stage.tokens // stage.tokens_per_batch
        ):
            continue
        longhaul(
            "pretrain", "--card", TINY.name, "--ladder", ladder, "--stage", str(stage.seq_length),
            "--store", store, "--out", run, "--device", "cpu", "--layout", layout,
        )  # fmt: skip
    return run


def stage_of(run: Path, length: int) -> str | None:
    """Return the name of a run's stage of that length."""
    return next((path.name for path in run.glob(f"stages/*_{length_word(length)}")), None)


def evaluated(run: Path, text: Path, stages: int, documents: int, trials: int) -> None:
    """Evaluate each stage of a run at its length, on held-out documents of the standard library."""
    for length in LENGTHS[:stages]:
        bounds = ",".join(str(bound) for bound in BOUNDS if bound <= length)
        longhaul(
            "evaluate", "--run", run, "--store", text, "--stage", str(length), "--missing",
            "--lengths", bounds, "--documents", str(documents), "--trials", str(trials),
        )  # fmt: skip


def loss_row(found: Evaluation, present: Evaluation | None, wide: int) -> list[str]:
    """Return the loss in each range, and its difference from the present mix on the same text."""
    cells = []
    for at in range(wide):
        if at >= len(found.ranges):
            cells.append("")
            continue
        mean = found.ranges[at]
        cell = f"{mean.loss:.3f} +- {mean.standard_error:.3f}"
        if present is not None and present != found:
            pairs = zip(mean.by_document, present.ranges[at].by_document, strict=True)
            apart = [mine - theirs for mine, theirs in pairs]
            cell += f" ({sum(apart) / len(apart):+.3f} +- {standard_error(apart):.3f})"
        cells.append(cell)
    return cells


def passkey_row(found: Evaluation, wide: int) -> list[str]:
    """Return the share of passkeys found, with its error, and the nats of an answer's token."""
    grid = found.passkey
    assert grid is not None
    cells = []
    for at in range(wide):
        if at >= len(grid.lengths):
            cells.append("")
            continue
        prompts = grid.trials * len(grid.depths)
        share = sum(grid.hits[at]) / len(grid.depths)
        likely = (share * prompts + 1) / (prompts + 2)  # never 0: none of 60 is not certainly none
        error = math.sqrt(likely * (1 - likely) / (prompts + 2))
        nats = sum(grid.nats[at]) / len(grid.depths)
        cells.append(f"{share:.0%} +- {error:.0%} of {prompts}; {nats:.2f}")
    return [*cells, f"{grid.chance_nats:.2f}"]


def evaluation(run: Path, length: int) -> Evaluation | None:
    """Return the evaluation of a run's stage of that length."""
    name = stage_of(run, length)
    return None if name is None else read_evaluation(run, name)


def sections(runs: dict[str, Path], stages: int) -> list[str]:
    """Return the page's tables from the evaluations of the runs, the present mix first."""
    bounds = [bound for bound in BOUNDS if bound <= LENGTHS[stages - 1]]
    losses, passkeys = [], []
    present = next(iter(runs.values()))
    for length in LENGTHS[:stages]:
        before = evaluation(present, length)
        for label, run in runs.items():
            found = evaluation(run, length)
            if found is None:
                continue
            wide = len(bounds)
            losses.append([f"{length:,}", label, *loss_row(found, before, wide)])
            passkeys.append([f"{length:,}", label, *passkey_row(found, wide)])
    lengths = [f"{bound:,}" for bound in bounds]
    ranges = [f"to {length}" for length in lengths]
    return [
        "Loss in nats per token by position, with its standard error over documents; in brackets"
        " the difference from the present mix on the same documents:",
        table(["stage", "mix", *ranges], losses),
        "Passkeys found by length of the prompt, with the standard error, and nats per token of the"
        " answers; the last column is what a uniform draw of digits has:",
        table(["stage", "mix", *lengths, "chance"], passkeys),
    ]


def main() -> None:
    """Train and evaluate what is missing, print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiny_retrieval",
        description="The tiny ladder with best-fit rows and shares of synthetic retrieval.",
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for stores and runs")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.3])
    parser.add_argument("--stages", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--trials", type=int, default=12, help="prompts for each length and depth")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    work: Path = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    text = text_store(work).root
    mixed = mixed_store(training_texts(), max(given.shares), TINY_LADDER.stages, work)
    runs = {"present": trained("tiny", text, work / "present", given.stages)}
    for share in given.shares:
        label = f"best fit, {share:.0%} retrieval" if share else "best fit"
        ladder = mixed_ladder(share, work)
        runs[label] = trained(ladder, mixed, work / ladder.stem, given.stages)
    for run in runs.values():
        evaluated(run, text, given.stages, given.documents, given.trials)
    written = page(
        "The tiny ladder with best-fit rows and synthetic retrieval",
        facts(["nemo_toolkit", "megatron-core"]),
        sections(runs, given.stages),
    )
    print(written, end="")
    if given.out is not None:
        write(given.out, written)


if __name__ == "__main__":
    main()
