# SPDX-License-Identifier: Apache-2.0
"""Packing a million documents of a long-tailed length law: padding, cuts, seconds, balance.

    python -m benchmarks.packing
    python -m benchmarks.packing --documents 10000000

Claims, at 1M documents: padding below 1%, no document cut that fits a row, at most 10 s a length.
Balance is over a step of 64 rows on 8 data ranks, attention within documents: the work of the
fullest rank over the average, with rows in the order of the schedule and with rows given out by
work. The predicted step time is the planner's for Llama 3.1 8B on 64 H100, whose attention is
stretched by that factor; nothing is measured on GPUs.

The lengths are made up: log-normal with a median of 700 tokens and a standard deviation of 1.4 in
the logarithm, at most 2 million tokens.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.mixture.config import Mix, PackingKind
from data.mixture.groups import Group
from data.mixture.schedule import Schedule
from data.mixture.stage_rows import StageRows
from data.packing.balance import balanced, imbalance
from data.packing.rows import Request, Rows, packed
from data.token_files.length_counts import counts_of
from recipes.models import CARDS
from recipes.planner.documents import DocumentLengths
from recipes.planner.plan import Plan
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest
from recipes.spec import cluster
from recipes.spec.units import K

MEDIAN, SIGMA, LONGEST = 700, 1.4, 2_000_000
LENGTHS = (8 * K, 32 * K, 128 * K)
ROWS, RANKS, STEPS = 64, 8, 200
MOST_PADDING, MOST_SECONDS = 0.01, 10.0
BILLION = 10**9


class Packed(NamedTuple):
    """What packing at one length gave."""

    rows: Rows
    seconds: float
    opened: float
    """Seconds until the documents of the first step are known, from the finished index."""
    size: int
    """Bytes of the index."""
    broken: int
    """Documents that fit a row and were cut."""


def law(documents: int) -> NDArray[np.int32]:
    """Return the lengths [n] of the documents."""
    draw = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, documents)
    return np.clip(draw, 1, LONGEST).astype(np.int32)


def measure(
    folder: Path, lengths: NDArray[np.int32], row_length: int, packing: PackingKind
) -> Packed:
    """Pack all documents into rows of a length."""
    request = Request(
        lengths_sha256=f"{row_length}", at_least=1, below=None, row_length=row_length,
        packing=packing, documents_per_row=None, overlap=0, seed=1,
    )  # fmt: skip
    began = time.perf_counter()
    rows = packed(folder, request, lengths)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    again = stage_rows(packed(folder, request, lengths), lengths)
    for ref in again.step(0):
        again.sequence(ref)
    opened = time.perf_counter() - began
    place = folder / f"rows-{request.key}"
    size = sum(file.stat().st_size for file in place.iterdir())
    return Packed(rows, seconds, opened, size, _broken(place, lengths, row_length))


def _broken(place: Path, lengths: NDArray[np.int32], row_length: int) -> int:
    """Return the documents that fit a row and have several pieces, counted from the files."""
    documents = np.memmap(place / "documents", dtype="<u4", mode="r")
    pieces = np.bincount(documents, minlength=lengths.size)
    return int(((pieces > 1) & (lengths <= row_length)).sum())


def stage_rows(rows: Rows, lengths: NDArray[np.int32]) -> StageRows:
    """Return a stage of `STEPS` steps over packed rows."""
    group = Group(
        source="documents", at_least=1, below=None, seq_length=rows.request.row_length, weight=1.0,
        end_weight=1.0, documents=lengths.size, tokens=int(lengths.sum(dtype=np.int64)),
    )  # fmt: skip
    schedule = Schedule.of(Mix(), [group], steps=STEPS, rows=ROWS, filled=[rows.filled])
    return StageRows(rows.request.row_length, 1, STEPS, (group,), (rows,), schedule, (0,))


def balance(stage: StageRows) -> tuple[float, float]:
    """Return the work of the fullest rank over the average: in order, and given out by work."""
    before, after = [], []
    for step in range(STEPS):
        work = stage.work(stage.step(step))
        in_order = [list(range(rank, ROWS, RANKS)) for rank in range(RANKS)]
        before.append(imbalance(work, in_order))
        after.append(imbalance(work, balanced(work, RANKS)))
    return float(np.mean(before)), float(np.mean(after))


def planned(row_length: int, lengths: NDArray[np.int32]) -> Plan:
    """Return the planner's choice for such documents on 64 H100."""
    buckets = counts_of(lengths[:200_000]).buckets()
    counts = tuple((round(one.tokens / one.documents), one.documents) for one in buckets)
    return search(
        SearchRequest(
            card=CARDS["llama31_8b"],
            seq_length=row_length,
            tokens_per_batch=ROWS * row_length,
            cluster=cluster.load("dgx_h100"),
            gpus=64,
            documents=DocumentLengths(counts),
        )
    ).plans[0]


def stretched(plan: Plan, factor: float) -> float:
    """Return the seconds of a step whose fullest rank has `factor` times the average attention."""
    categories = plan.time.categories
    rest = plan.time.step - categories["attention"] - categories.get("waiting", 0.0)
    return rest + factor * categories["attention"]


def whole_page(documents: int) -> str:
    """Return the page."""
    lengths = law(documents)
    tokens = int(lengths.sum(dtype=np.int64))
    rows, balances, held = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for row_length in LENGTHS:
            of_cut = measure(Path(folder) / "cut", lengths, row_length, "cut")
            ours = measure(Path(folder), lengths, row_length, "best_fit")
            padding, least = (
                1 - ours.rows.filled,
                1 - tokens / row_length / -(-tokens // row_length),
            )
            held += padding < MOST_PADDING and not ours.broken and ours.seconds <= MOST_SECONDS
            rows.append(_row(row_length, ours, least, of_cut, documents))
            before, after = balance(stage_rows(ours.rows, lengths))
            plan = planned(row_length, lengths)
            times = [stretched(plan, factor) for factor in (before, after)]
            balances.append(
                [
                    f"{row_length:,}", f"{before:.3f}", f"{after:.3f}", f"{times[0]:.2f}",
                    f"{times[1]:.2f}", f"{times[1] / times[0]:.3f}",
                ]
            )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return page(
        f"Packing {documents:,} documents",
        facts([]),
        [
            f"{documents:,} documents, {tokens:,} tokens. The claims hold for {held} of "
            f"{len(LENGTHS)} lengths. Peak memory of the process: {peak / 2**30:.2f} GiB, with the "
            "lengths themselves and the libraries.",
            table(HEAD, rows),
            "`least` is the padding of the fewest rows that can hold all tokens. `broken` are "
            "documents cut although they fit a row: by best fit, and by concatenate and cut. "
            "`opened` is from the finished index to the documents of the first step.",
            table(
                ["tokens of a row", "in order", "by work", "s in order", "s by work", "ratio"],
                balances,
            ),
            f"Work of the fullest of {RANKS} data ranks over the average, mean of {STEPS} steps of "
            f"{ROWS} rows, and the predicted seconds of a step.",
        ],
    )


HEAD = [
    "tokens of a row", "rows", "padding", "least", "broken", "broken by cut", "seconds",
    "index bytes a document", "GB at 10^9", "hours at 10^9", "opened, s",
]  # fmt: skip


def _row(row_length: int, ours: Packed, least: float, of_cut: Packed, documents: int) -> list[str]:
    cells: list[Any] = [
        f"{row_length:,}", f"{ours.rows.rows:,}", f"{1 - ours.rows.filled:.5%}", f"{least:.5%}",
        f"{ours.broken:,}", f"{of_cut.broken:,}", f"{ours.seconds:.1f}",
        f"{ours.size / documents:.1f}", f"{ours.size / documents * BILLION / 1e9:.0f}",
        f"{ours.seconds / documents * BILLION / 3600:.1f}", f"{ours.opened:.2f}",
    ]  # fmt: skip
    return cells


def main() -> None:
    """Print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packing",
        description="Padding, cuts, seconds and balance of packed documents.",
    )
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents to pack")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    text = whole_page(given.documents)
    if given.out is not None:
        write(given.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
