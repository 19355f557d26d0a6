# SPDX-License-Identifier: Apache-2.0
"""The extremes of a preparation: one JSON line of a gigabyte, and an index of many documents.

    python -m benchmarks.prepare_extremes
    python -m benchmarks.prepare_extremes --line-mb 100 --documents 1000000

Claim: a line of 1 GB takes less than 4 GiB and minutes, with the ids of the whole text; the index
of a billion documents takes minutes, and no memory for each document.

One process prepares the line, and the ids of the beginning of its text are compared with those
that the tokenizer gives for it as a whole. The index is written for lengths of a long-tailed law.
Memory is the largest sum of the resident sets of all processes, sampled each 0.1 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.prepare import Peak, texts, write_corpus, write_tokenizer

PREFIX_CHARS = 2**20
TRAINED_MB = 40


def index(documents: int, folder: Path) -> str:
    """Return the table of writing an index."""
    from data.preparation.merge import _write_index

    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.pareto(1.1, documents) * 300 + 20, 2**20).astype("<i4")
    path = folder / "lengths"
    lengths.tofile(path)
    del lengths
    begin = time.perf_counter()
    _write_index([path], documents, np.dtype(np.int32), folder / "a.idx")
    seconds = time.perf_counter() - begin
    size = (folder / "a.idx").stat().st_size
    for name in ("lengths", "a.idx"):
        (folder / name).unlink()
    scale = 10**9 / documents
    rows = [
        [f"{documents:,}", f"{seconds:.2f}", f"{size / 1e6:,.0f}"],
        ["1,000,000,000, in proportion", f"{seconds * scale:.0f}", f"{size * scale / 1e6:,.0f}"],
    ]
    return f"## The index\n\n{table(['documents', 'written in s', 'MB'], rows)}"


def long_line(megabytes: int, folder: Path, tokenizer: Path) -> str:
    """Return the table of one long line."""
    path, size, stream = folder / "line.jsonl", 0, texts()
    with path.open("w", encoding="utf-8") as file:
        for number in range(40):
            file.write(json.dumps({"text": f"short document {number}"}) + "\n")
        file.write('{"id": 1, "text": "')
        while size < megabytes * 1_000_000:
            text = next(stream)
            file.write(json.dumps(text)[1:-1])
            size += len(text.encode())
        file.write('", "after": [1, 2]}\n')
    words = [str(path), str(tokenizer), "1"]
    with tempfile.TemporaryDirectory(prefix="prepare-") as out:
        command = [sys.executable, "-m", "benchmarks.prepare", "--contestant", "ours", *words, out]
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "true"},
        )  # fmt: skip
        peak = Peak(running.pid)
        said, _ = running.communicate()
        peak.stop()
        same, tokens = _prefix_is_the_same(Path(out) / "store", tokenizer)
    path.unlink()
    rows = [
        [
            f"{size / 1e6:,.0f}", f"{tokens:,}", f"{float(said.split()[-2]):.0f}",
            f"{peak.bytes / 2**20:,.0f}", "yes" if same else "NO",
        ]
    ]  # fmt: skip
    same_prefix = f"ids of the first {PREFIX_CHARS:,} characters are those of the whole"
    head = ["MB of text", "tokens", "seconds", "peak, MiB", same_prefix]
    return f"## One line, one process\n\n{table(head, rows)}"


def _prefix_is_the_same(store: Path, tokenizer: Path) -> tuple[bool, int]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    from data.store import Manifest

    manifest = Manifest.load(store)
    prefix = max(
        (manifest.split(name) for name in ("train", "heldout")), key=lambda split: split.longest
    ).parts[0].prefix  # fmt: skip
    stored = IndexedDataset(str(store / prefix))
    at = int(np.argmax(stored.sequence_lengths))
    text, stream = "", texts()
    while len(text) < PREFIX_CHARS + 10_000:
        text += next(stream)
    cut = text.rfind("\n", 0, PREFIX_CHARS)
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    encoder.encode_special_tokens = True
    ids = np.array(encoder.encode(text[:cut], add_special_tokens=False).ids)[:-8]
    found = np.asarray(stored.get(at, 0, ids.size))
    return bool(np.array_equal(ids, found)), int(stored.sequence_lengths[at])


def main() -> None:
    """Prepare the line and write the index; print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--line-mb", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", TRAINED_MB)
        write_tokenizer(folder / "corpus.jsonl", folder / "tokenizer")
        parts = [
            index(arguments.documents, folder),
            long_line(arguments.line_mb, folder, folder / "tokenizer"),
        ]
    load = {"load over a minute": f"{os.getloadavg()[0]:.1f}"}
    text = page("A long line and a long index", {**facts(("tokenizers",)), **load}, parts)
    print(text, end="")
    if arguments.out is not None:
        write(arguments.out, text)


if __name__ == "__main__":
    main()
