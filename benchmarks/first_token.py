# SPDX-License-Identifier: Apache-2.0
"""Loss of a model that reads without the first token it was trained with, on CPU.

    python -m benchmarks.first_token --work FOLDER

A small model is trained on documents of the standard library, cut to a few hundred tokens, whose
tokenizer puts `<s>` first (`TemplateProcessing`, as Llama's does): each of its sequences is packed
of whole documents that attend within themselves. Then held-out documents are read with it and
without it. What is compared are the losses of the same tokens, document by document.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import nemo_run
import torch
from tokenizers import processors

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.rope_methods import train
from benchmarks.stacks import one_rank
from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, Share
from data.prepare import prepare
from data.store import ONLY_SOURCE, Manifest
from data.token_files.held_out import long_documents
from data.tokenization import tokenizer
from eval import load_model
from eval.loss.loss_by_position import token_losses
from eval.uncertainty import standard_error
from recipes.models import TINY
from recipes.nemo2.settings import place
from recipes.pretrain import pretrain
from recipes.spec.layout import Layout
from recipes.spec.stage import Cosine, Ladder, Stage

FIRST = "<s>"
LENGTH, READ = 512, 256
"""Tokens of a training sequence, and tokens of a held-out document that are read."""
CHARACTERS = 900
BANDS = (1, 4, 16, 64, READ)
"""Places of the tokens that are predicted, counted from 0 without the first token."""


def texts() -> Iterator[str]:
    """Yield pieces of the library's files, each of about `CHARACTERS` from a line's start on."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        held = ""
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            held += line
            if len(held) >= CHARACTERS:
                yield held
                held = ""


def store(folder: Path) -> Manifest:
    """Return the store of the texts, by a tokenizer with a first token; make both if need be."""
    if (folder / "store").is_dir():
        return Manifest.load(folder / "store")
    made = list(texts())
    trained = tokenizer.train(made, TINY.vocab - 1).hugging_face
    trained.add_special_tokens({"bos_token": FIRST})
    trained.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A", special_tokens=[(FIRST, trained.bos_token_id)]
    )
    trained.save_pretrained(str(folder / "tokenizer"))
    corpus = folder / "texts.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in made))
    return prepare(str(corpus), folder / "store", tokenizer=str(folder / "tokenizer"))


def recipe(manifest: Manifest, folder: Path, steps: int) -> nemo_run.Partial:
    """Return the stage: whole documents of fewer tokens than a sequence, packed."""
    stage = Stage(
        seq_length=LENGTH, rope=RopeScaling.base_change(10_000), tokens=steps * 8 * LENGTH,
        tokens_per_batch=8 * LENGTH, lr=Cosine(peak=6e-3), start="scratch", documents="within",
        mix=Mix(shares=(Share(source=ONLY_SOURCE, weight=1.0, below=LENGTH),)),
    )  # fmt: skip
    ladder = Ladder(name="first", source="ours", stages=(stage,))
    made = pretrain(TINY, ladder, LENGTH, Layout(dp=2, precision="fp32", device="cpu"))
    place(made, TINY, ladder, stage, run_to=folder, store=manifest.root)
    made.trainer.val_check_interval = steps
    made.trainer.limit_val_batches = 1
    return made


def losses(stage: Path, manifest: Manifest, documents: int) -> dict[str, list[list[float]]]:
    """Return the losses of the tokens 1 to `READ` of documents, read with and without `FIRST`."""
    found: dict[str, list[list[float]]] = {"with": [], "without": []}
    model = load_model.load(stage, seq_length=LENGTH)
    for text in islice(long_documents(manifest, min_tokens=READ + 1), documents):
        whole = torch.from_numpy(text[None, : READ + 1])
        found["with"].append(token_losses(model, whole)[0][0, 1:].tolist())
        found["without"].append(token_losses(model, whole[:, 1:])[0][0].tolist())
    return found


def rows(found: dict[str, list[list[float]]]) -> list[list[str]]:
    """Return the mean losses of each band, and the difference document by document."""
    made = []
    for start, stop in pairwise(BANDS):
        one, other = (
            [mean(losses[start - 1 : stop - 1]) for losses in found[name]] for name in found
        )
        more = [b - a for a, b in zip(one, other, strict=True)]
        made.append(
            [f"{start} to {stop - 1}", f"{mean(one):.3f} +- {standard_error(one):.3f}",
             f"{mean(other):.3f} +- {standard_error(other):.3f}",
             f"{mean(more):+.3f} +- {standard_error(more):.3f}"]
        )  # fmt: skip
    return made


def main() -> None:
    """Train, measure, print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token")
    parser.add_argument("--work", type=Path, required=True, help="folder for store and stage")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    manifest = store(given.work)
    stage = train(recipe(manifest, given.work, given.steps), given.work)
    with one_rank(torch.device("cpu")):
        found: Any = losses(stage, manifest, given.documents)
    text = page(
        "Reading without the first token that a model was trained with",
        facts(["nemo_toolkit", "megatron-core", "tokenizers"]),
        [
            f"A model of {TINY.layers} layers, trained for {given.steps} steps of 4,096 tokens on "
            f"documents that begin with `{FIRST}`. Mean loss in nats of the same tokens of "
            f"{len(found['with'])} held-out documents, by their place.",
            table(["token", "with it", "without", "without minus with"], rows(found)),
        ],
    )
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
