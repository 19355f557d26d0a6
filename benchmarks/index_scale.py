# SPDX-License-Identifier: Apache-2.0
"""Bytes and seconds of a store's indexes, manifest and census at millions of documents.

    python -m benchmarks.index_scale
    python -m benchmarks.index_scale --documents 1000000 10000000 --scanned-tokens 1000000000
    python -m benchmarks.index_scale --documents 10000000 --pairs 1 300

The lengths are made up: log-normal with a median of 600 tokens and a standard deviation of 1.4 in
the logarithm, so a mean of some 1,600 and a long tail, at most 2 million. Indexes are real files;
token files have the right size and no blocks on the disk (they read as zeros), since only the last
steps read tokens. With several pairs the documents are one source of them. Each step runs in a
process of its own, once; its peak memory includes the pages of mapped files that it touched. The
column of 10^9 documents multiplies the largest case.

What each step does:

    index checked       header, sizes, every place within the token file (what `adopt` does first)
    store written       held-out documents chosen by hash, two indexes written and hashed, manifest
    manifest loaded     `Manifest.load`, as every command that reads a store does
    opened by Megatron  its `IndexedDataset` of the training documents, as each rank opens it
    lengths counted     of `longhaul data inspect`: the table of lengths, what each keeps whole
    padding packed      of `longhaul data inspect`: up to 131,072 documents packed at each length
    tokens read         hashes, range of ids and ends of documents, of some documents only
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np

from data.adoption.adopt import write_part
from data.adoption.checks import Checked, HeldOut, held_out
from data.adoption.pairs import Named, Pair, pairs_of
from data.census import LengthTable, curve_lengths, indexes
from data.splits import SourceFacts, Split
from data.store import SPLITS, TOKENIZER, TOKENIZER_FILE, Manifest, TokenizerFacts
from data.token_files.document_scan import scan
from data.token_files.megatron_index import read_index, write_index

MEDIAN, SIGMA, LONGEST = 600, 1.4, 2_000_000
TYPE = np.dtype("<u2")
BILLION = 10**9
PAIRS = "pairs"
Size = tuple[int, int]
"""Documents, and the pairs that they are in."""
Figures = dict[str, dict[str, float]]
"""Of each step."""
STEPS = {
    "checked": "index checked",
    "written": "store written",
    "loaded": "manifest loaded",
    "opened": "opened by Megatron",
    "counted": "lengths counted",
    "packed": "padding packed",
    "scanned": "tokens read",
}


def make_up(folder: Path, documents: int, pairs: int) -> None:
    """Write the indexes of made-up documents, and token files of the sizes they describe."""
    draws = np.random.default_rng(0)
    lengths = np.minimum(draws.lognormal(np.log(MEDIAN), SIGMA, documents) + 1, LONGEST)
    (folder / PAIRS).mkdir()
    for number, part in enumerate(np.array_split(lengths.astype(np.int32), pairs)):
        ends = np.cumsum(part, dtype=np.int64) * TYPE.itemsize
        pair = folder / PAIRS / f"{number:05d}.idx"
        write_index(pair, TYPE, part, ends - part * TYPE.itemsize)
        with pair.with_suffix(".bin").open("wb") as file:
            file.truncate(int(ends[-1]))


def checked(folder: Path, _: int) -> dict[str, float]:
    """Check the indexes against their token files."""
    for pair in _pairs(folder):
        read_index(pair.idx, fills_bin=True)
    return {}


def _pairs(folder: Path) -> list[Pair]:
    (pairs,) = pairs_of([Named(path=folder / PAIRS, name="made-up")]).values()
    return pairs


def written(folder: Path, _: int) -> dict[str, float]:
    """Write the store of the indexes, without reading tokens."""
    pairs, draws = _pairs(folder), np.random.default_rng(1)
    sizes = [pair.bin.stat().st_size for pair in pairs]
    of_pairs = []
    for pair in pairs:
        index = read_index(pair.idx)
        hashes = draws.integers(0, 2**63, len(index.lengths)).astype(np.uint64)
        lengths, pointers = np.array(index.lengths), np.array(index.pointers)
        of_pairs.append(Checked(pair.name, TYPE, lengths, pointers, hashes, 0, 0))
    listed = Checked.joined(of_pairs, sizes)
    chosen = held_out(listed, HeldOut(), 0)
    store = folder / "store"
    (store / TOKENIZER).mkdir(parents=True)
    (store / TOKENIZER / TOKENIZER_FILE).write_text("{}")
    sums = {pair.bin: "not computed" for pair in pairs}
    train, heldout = (
        Split(parts=(write_part(store, split, pairs, listed, documents, sums),))
        for split, documents in zip(SPLITS, (~chosen, chosen), strict=True)
    )
    Manifest(
        root=store,
        sources=(SourceFacts(name="made-up", kind="adopted", origin="made up"),),
        heldout_fraction=0.1,
        seed=0,
        tokenizer=TokenizerFacts(name="none", fingerprint="", vocab_size=1, eod_id=0),
        train=train,
        heldout=heldout,
        skipped={},
    ).write()
    return {"index": sum((store / f"{split}.idx").stat().st_size for split in SPLITS)}


def loaded(folder: Path, _: int) -> dict[str, float]:
    """Load the manifest."""
    Manifest.load(folder / "store")
    return {"manifest": (folder / "store" / "manifest.json").stat().st_size}


def opened(folder: Path, _: int) -> dict[str, float]:
    """Open the training documents with Megatron's reader; its import is not timed."""
    from data.token_files.stored_documents import StoredDocuments

    began = time.perf_counter()
    dataset = StoredDocuments(str(folder / "store" / "train"))
    return {"seconds": time.perf_counter() - began, "documents": len(dataset)}


def counted(folder: Path, _: int) -> dict[str, float]:
    """Count lengths, and what each sequence length keeps whole."""
    table = _table(folder)
    for length in curve_lengths(table.longest):
        table.kept(length)
    return {"documents": table.documents, "tokens": table.tokens}


def packed(folder: Path, _: int) -> dict[str, float]:
    """Pack documents at each sequence length; counting lengths before is not timed."""
    table = _table(folder)
    began = time.perf_counter()
    paddings = [table.packed(length).padding for length in curve_lengths(table.longest)]
    return {"seconds": time.perf_counter() - began, "lengths": len(paddings)}


def _table(folder: Path) -> LengthTable:
    (index,) = indexes(Manifest.load(folder / "store"), "train").values()
    return LengthTable.of([index.lengths])


def scanned(folder: Path, tokens: int) -> dict[str, float]:
    """Read the first documents that have this many tokens together."""
    (index,) = indexes(Manifest.load(folder / "store"), "train").values()
    some = int(np.searchsorted(np.cumsum(index.lengths, dtype=np.int64), tokens, side="right"))
    lengths, pointers = np.array(index.lengths[:some]), np.array(index.pointers[:some])
    began = time.perf_counter()
    scan(index.mapped(), pointers // TYPE.itemsize, lengths, 0)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": int(lengths.sum(dtype=np.int64))}


def step(name: str, folder: Path, tokens: int) -> None:
    """Run one step and print its seconds, its peak memory and its figures as JSON."""
    began = time.perf_counter()
    figures = globals()[name](folder, tokens)
    figures.setdefault("seconds", time.perf_counter() - began)
    figures["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps(figures))


def measured(folder: Path, documents: int, pairs: int, tokens: int) -> Figures:
    """Return the figures of every step for a number of documents in a number of pairs."""
    make_up(folder, documents, pairs)
    found = {}
    for name in STEPS:
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.index_scale", "--step", name]
        done = subprocess.run(
            [*words, "--folder", str(folder), "--scanned-tokens", str(tokens)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{name} failed: {done.stderr}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(results: Mapping[Size, Figures]) -> list[list[str]]:
    """Return a row for each step: seconds and peak memory at each size."""
    largest = max(results)
    lines = []
    for name, words in STEPS.items():
        cells = [words]
        for figures in results.values():
            cells += [f"{figures[name]['seconds']:,.2f}", f"{figures[name]['peak'] / 2**20:,.0f}"]
        seconds = results[largest][name]["seconds"] * BILLION / largest[0]
        other = {"loaded": "the same", "packed": "the same", "scanned": "-"}
        cells.append(other.get(name, f"{seconds:,.0f}"))
        lines.append(cells)
    return lines


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1])
    parser.add_argument("--scanned-tokens", type=int, default=BILLION)
    parser.add_argument("--out", type=Path, help="write the page there as well")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        step(given.step, given.folder, given.scanned_tokens)
        return
    results = {}
    for size in product(given.documents, given.pairs):
        folder = Path(tempfile.mkdtemp(prefix="index-scale-"))
        try:
            results[size] = measured(folder, *size, given.scanned_tokens)
        finally:
            shutil.rmtree(folder)
    # Imported late: a child's peak memory counts that of the process it is forked from.
    from benchmarks.harness.machine import facts
    from benchmarks.harness.page import page, table, write

    head = ["step"]
    for documents, pairs in results:
        of_pairs = f" of {pairs:,} pairs" if pairs > 1 else ""
        head += [f"{documents:,} documents{of_pairs}, s", "peak, MiB"]
    largest = max(results)
    last = results[largest]
    per_document = last["written"]["index"] / largest[0]
    rate = last["scanned"]["tokens"] / last["scanned"]["seconds"]
    text = page(
        "Indexes, manifest and census of a store, by its documents",
        facts(("numpy", "megatron-core"))
        | {"load over a minute": f"{os.getloadavg()[0]:.1f}"},  # the seconds grow with it
        [
            table([*head, f"{BILLION:,} documents, s, in proportion"], rows(results)),
            f"Indexes take {per_document:.1f} bytes a document: "
            f"{per_document * BILLION / 1e9:,.0f} GB for {BILLION:,} documents. The manifest has "
            f"{last['loaded']['manifest']:,.0f} bytes with the most pairs. Reading tokens took "
            f"{rate / 1e6:,.0f} million a second on this machine's cores; 10^13 tokens are "
            f"{1e13 / rate / 3600:,.0f} hours of such a machine, shared by as many as adopt parts.",
        ],
    )
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
