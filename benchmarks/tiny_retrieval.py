# SPDX-License-Identifier: Apache-2.0
"""Whether a share of synthetic retrieval lets the tiny ladder find passkeys, at the same budget.

    python -m benchmarks.tiny_retrieval --work FOLDER --shares 0 0.3

For each share the tiny ladder is trained once: the same card, steps, rates and seed; share 0 is the
ladder as it is, on Python's standard library. With a share, each stage has a store of its own: text
of the standard library, and synthetic documents (`data.long_range`) that have this share of the
tokens. They are the evaluation's kind of document, several keys with numbers in real text and
`assert KEY == number` at the end, with other names, and no held-out text in them. Rows are cut from
the joined documents, so the synthetic ones are at most half as long as a row.

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
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.prepare import HELDOUT_FRACTION, content_hash, prepare
from data.readers import documents
from data.sources import numbered
from data.store import Manifest
from data.tokenization.tokenizer import DocumentTokenizer, load
from eval.report.gains import standard_error
from eval.run_folder import Evaluation, read_evaluation
from recipes.checkpoints.marker import is_finished
from recipes.ladders.tiny import TINY_LADDER
from recipes.models import TINY
from recipes.spec.stage import Stage

SEED = 20_261_124
TIMES = 3
"""Tokens of a stage's store, in budgets of the stage: no row is read twice."""
KINDS = {
    "retrieval": "synthetic:retrieval,form=code,keys=4,queries=4",
    "copy": "synthetic:copy,passage={passage}",
}
LENGTHS = [stage.seq_length for stage in TINY_LADDER.stages]
BOUNDS = (LENGTHS[0] // 2, *LENGTHS)
"""Ends of the ranges of positions, and lengths of the passkey prompts."""


def names() -> list[str]:
    """Return the recipes of the tiny ladder's stages."""
    return [f"tiny_{f'{n // 1024}k' if n >= 1024 else n}" for n in LENGTHS]


def text_store(work: Path) -> Manifest:
    """Return the store of the standard library, with the tokenizer of all others."""
    place = work / "text"
    if not place.exists():
        prepare(None, place, vocab_size=TINY.vocab)
    return Manifest.load(place)


def training_texts() -> Iterator[str]:
    """Yield the documents that are not held out, in the order of their hashes."""
    found = [(content_hash(text, 0), text) for text, _ in documents(None)]
    yield from (text for place, text in sorted(found) if place >= HELDOUT_FRACTION)


def mixed_store(
    stage: Stage, share: float, kinds: Sequence[str], work: Path, tokenizer: DocumentTokenizer
) -> Path:
    """Return the store of a stage: text, and synthetic documents with a share of the tokens."""
    place = work / f"mix_{stage.seq_length}"
    if place.exists():
        return place
    filler = work.parent / "filler.jsonl"
    if not filler.exists():
        filler.write_text("".join(json.dumps({"text": text}) + "\n" for text in training_texts()))
    budget = TIMES * stage.tokens
    texts = (text for text, _ in documents(str(filler)))
    made = chain(
        taken(texts, round(budget * (1 - share)), tokenizer),
        *(
            taken(synthetic(kind, stage, filler, tokenizer), round(budget * part), tokenizer)
            for kind in kinds
            for part in [share / len(kinds)]
        ),
    )
    source = work / f"mix_{stage.seq_length}.jsonl"
    with source.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in made)
    prepare(str(source), place, tokenizer=str(work.parent / "text" / "tokenizer"))
    return place


def synthetic(kind: str, stage: Stage, filler: Path, tokenizer: DocumentTokenizer) -> Iterator[str]:
    """Yield synthetic documents of at most half a row."""
    longest = stage.seq_length // 2
    name = KINDS[kind].format(passage=longest // 8)
    name += f",length={max(160, longest // 8)}-{longest},documents=1000000,seed={SEED}"
    source = numbered(f"{name},filler={filler}", tokenizer.count)
    return (source.document(number, Counter()).text for number in range(len(source)))


def taken(texts: Iterator[str], tokens: int, tokenizer: DocumentTokenizer) -> Iterator[str]:
    """Yield texts until they have so many tokens."""
    for text in texts:
        if tokens <= 0:
            return
        tokens -= tokenizer.count(text) + 1
        yield text


def longhaul(*words: str | Path) -> None:
    """Run a command of Longhaul; its output goes to this process's."""
    command = [sys.executable, "-c", "from longhaul.cli import main; main()", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def trained(share: float, kinds: Sequence[str], work: Path, stages: int) -> Path:
    """Train the first stages of the ladder on a mix unless they have been; return the run."""
    text = text_store(work)
    folder = work / f"share_{share:g}_{'_'.join(kinds)}"
    folder.mkdir(exist_ok=True)
    tokenizer = load(str(text.tokenizer_path))
    for name, stage in list(zip(names(), TINY_LADDER.stages, strict=True))[:stages]:
        checkpoints = folder / "run" / "stages" / name / "checkpoints"
        if is_finished(checkpoints, stage.tokens // stage.tokens_per_batch):
            continue
        store = mixed_store(stage, share, kinds, folder, tokenizer) if share else text.root
        longhaul("pretrain", "--factory", name, "--store", store, "--out", folder / "run")
    return folder / "run"


def evaluated(run: Path, text: Path, stages: int, documents: int, trials: int) -> None:
    """Evaluate each stage of a run at its length, on held-out documents of the standard library."""
    for name, length in list(zip(names(), LENGTHS, strict=True))[:stages]:
        bounds = tuple(bound for bound in BOUNDS if bound <= length)
        found = read_evaluation(run, name)
        grid = None if found is None else found.passkey
        if found is not None and grid is not None:
            asked = found.documents, grid.lengths, grid.trials, found.eval_length
            if asked == (documents, bounds, trials, length):
                continue
        longhaul(
            "evaluate", "--run", run, "--store", text, "--stage", name,
            "--lengths", ",".join(map(str, bounds)), "--documents", str(documents),
            "--trials", str(trials),
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


def sections(runs: dict[str, Path], stages: int) -> list[str]:
    """Return the page's tables from the evaluations of the runs, the present mix first."""
    bounds = [bound for bound in BOUNDS if bound <= LENGTHS[stages - 1]]
    losses, passkeys = [], []
    present = next(iter(runs.values()))
    for name in names()[:stages]:
        for label, run in runs.items():
            found = read_evaluation(run, name)
            if found is None:
                continue
            wide = len(bounds)
            losses.append([name, label, *loss_row(found, read_evaluation(present, name), wide)])
            passkeys.append([name, label, *passkey_row(found, wide)])
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
        description="The tiny ladder with shares of synthetic retrieval, at the same budget.",
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for stores and runs")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["retrieval"])
    parser.add_argument("--present", type=Path, help="run of the ladder on the present mix")
    parser.add_argument("--stages", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--trials", type=int, default=12, help="prompts for each length and depth")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    text = text_store(given.work).root
    runs = {"present": given.present or trained(0, [], given.work, given.stages)}
    for share in given.shares:
        label = f"{share:.0%} {' and '.join(given.kinds)}"
        runs[label] = trained(share, given.kinds, given.work, given.stages)
    for run in runs.values():
        evaluated(run, text, given.stages, given.documents, given.trials)
    written = page(
        "The tiny ladder with synthetic retrieval in its mix",
        facts(["nemo_toolkit", "megatron-core"]),
        sections(runs, given.stages),
    )
    print(written, end="")
    if given.out is not None:
        write(given.out, written)


if __name__ == "__main__":
    main()
