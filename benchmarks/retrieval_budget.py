# SPDX-License-Identifier: Apache-2.0
"""How many tokens a small model needs until it answers from its context, on CPU.

    python -m benchmarks.retrieval_budget --tokenizer STORE/tokenizer --filler FILE --minutes 10

A Llama of transformers with the tiny card's sizes (or others) trains on rows that hold one
synthetic retrieval document each, and nothing else: the best case for a share of such documents in
a mix. Now and then it is asked for the numbers of documents that it has not seen. An answer is
found if each of its tokens is the most likely one, given those before.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.long_range.documents import filler_of, long_document
from data.long_range.spec import Spec
from data.readers import documents
from data.tokenization.tokenizer import DocumentTokenizer, load
from recipes.models import TINY

HELD_OUT = 48
"""Documents that are asked about; training takes the ones behind them."""
IGNORED = -100
ANSWER = re.compile(r"^(?:assert \w+ == |What is the code of \w+\? It is )(\d+)", re.MULTILINE)
WARMUP = 50


def model_of(layers: int, hidden: int, row: int) -> LlamaForCausalLM:
    """Return a model with the tiny card's sizes but for layers and width."""
    heads = TINY.heads * hidden // TINY.hidden
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TINY.vocab,
            hidden_size=hidden,
            intermediate_size=TINY.ffn_hidden * hidden // TINY.hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=row,
            tie_word_embeddings=True,
            initializer_range=TINY.init_std,
            rope_theta=10_000.0,
        )
    )


Row = tuple[NDArray[np.int64], list[slice]]
"""Tokens of a document, and the places of its answers."""


def rows_of(spec: Spec, tokenizer: DocumentTokenizer) -> Callable[[int], Row]:
    """Return the document of a number as tokens."""
    filler = filler_of(spec, lambda name: (text for text, _ in documents(name)))

    def row(number: int) -> Row:
        text = long_document(spec, number, tokenizer.count, filler)
        encoded = tokenizer.backend.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoded.offsets])
        ends = np.array([end for _, end in encoded.offsets])
        places = [
            slice(
                int(np.searchsorted(ends, answer.start(1), "right")),
                int(np.searchsorted(starts, answer.end(1))),
            )
            for answer in ANSWER.finditer(text)
        ]
        return np.array([*encoded.ids, tokenizer.eod_id]), places

    return row


def batch_of(rows: list[Row], length: int, eod: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [b, s] and labels [b, s], both filled behind the end of each document."""
    tokens = np.full((len(rows), length), eod)
    labels = np.full((len(rows), length), IGNORED)
    for at, (ids, _) in enumerate(rows):
        tokens[at, : ids.size] = labels[at, : ids.size] = ids
    return torch.from_numpy(tokens), torch.from_numpy(labels)


@torch.no_grad()
def answered(
    model: LlamaForCausalLM, rows: list[Row], length: int, eod: int
) -> tuple[float, float]:
    """Return the share of answers found, and the mean nats of an answer's token."""
    tokens, _ = batch_of(rows, length, eod)
    logits = model(input_ids=tokens).logits[:, :-1].float()
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view(len(rows), -1)
    right = logits.argmax(-1) == tokens[:, 1:]
    places = [(at, slice(p.start - 1, p.stop - 1)) for at, (_, of) in enumerate(rows) for p in of]
    found = [bool(right[at, place].all()) for at, place in places]
    return sum(found) / len(found), float(torch.cat([nats[at, p] for at, p in places]).mean())


def trained(given: argparse.Namespace, tokenizer: DocumentTokenizer, spec: Spec) -> list[list[str]]:
    """Train until the answers are found or the time is up; return a row for each look."""
    row, length = rows_of(spec, tokenizer), spec.length[1]
    asked = [row(number) for number in range(HELD_OUT)]
    model = model_of(given.layers, given.hidden, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95))
    looks, seen, started = [], 0, time.monotonic()
    for step in range(1_000_000):
        if step % given.every == 0:
            share, nats = answered(model, asked, length, tokenizer.eod_id)
            looks.append([str(step), f"{seen / 1e6:.2f}M", f"{share:.0%}", f"{nats:.2f}"])
            taken = f"{time.monotonic() - started:.0f} s"
            print(*looks[-1], taken, file=sys.stderr, flush=True)
            if share > 0.98 or time.monotonic() - started > 60 * given.minutes:
                break
        first = HELD_OUT + step * given.batch
        tokens, labels = batch_of(
            [row(first + at) for at in range(given.batch)], length, tokenizer.eod_id
        )
        optimizer.param_groups[0]["lr"] = given.lr * min(1, (step + 1) / WARMUP)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += int((labels != IGNORED).sum())
    return looks


def main() -> None:
    """Train, print each look, and write the page where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.retrieval_budget",
        description="Tokens of retrieval documents until a small model answers from its context.",
    )
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer of 512 tokens")
    parser.add_argument("--filler", help="source of text; without it made-up sentences")
    parser.add_argument("--words", default="form=code,keys=4,queries=4,length=192-256")
    parser.add_argument("--layers", type=int, default=TINY.layers)
    parser.add_argument("--hidden", type=int, default=TINY.hidden)
    parser.add_argument("--batch", type=int, default=32, help="documents of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=50, help="steps between two looks")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    tokenizer = load(given.tokenizer)
    if tokenizer.vocab_size != TINY.vocab:
        raise ValueError(f"{given.tokenizer} has {tokenizer.vocab_size} tokens, not {TINY.vocab}")
    words = f"synthetic:retrieval,{given.words},documents=100000000,seed=11"
    spec = Spec.parse(words + (f",filler={given.filler}" if given.filler else ""))
    looks = trained(given, tokenizer, spec)
    text = page(
        f"Tokens until {given.layers} layers of {given.hidden} answer from their context",
        facts(["transformers"]),
        [
            f"Only retrieval documents ({given.words}), {given.batch} a step, peak rate"
            f" {given.lr:g}; answers of {HELD_OUT} other documents.",
            table(["step", "tokens", "answers found", "nats per token"], looks),
        ],
    )
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
