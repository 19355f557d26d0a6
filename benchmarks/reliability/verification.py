# SPDX-License-Identifier: Apache-2.0
"""Seconds that verifying a store and a checkpoint takes, compared with loading them.

    python -m benchmarks.reliability.verification
    python -m benchmarks.reliability.verification --mb 200 --rounds 5

Megatron loads a checkpoint of the given size with and without comparing its SHA-256, in turn in one
process: once in two files, as a rank of Megatron writes it, and once in one file, as an import
does. It is saved too, and computing the sums is timed. A token store of the same size is opened,
verified by a sample, and verified whole. All files are in the page cache: from a slow disk loading
takes longer, and hashing waits for the same bytes.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.splits import LengthBucket, Part, SourceFacts, Split, StoredFile
from data.store import TOKENIZER_FILE, Manifest, TokenizerFacts, tokenizer_fingerprint
from data.token_files import verification
from recipes.checkpoints.files import described, for_marker
from recipes.checkpoints.verified import one_rank, verified

TENSORS = 32
HEAD = ["what", "how", "without, s", "verified, s", "added, s", "added, CPU s", "rounds, s"]

Seconds = tuple[float, float]
"""By the clock, and of CPU over all threads."""


def checkpoint(folder: Path, megabytes: int, files: int) -> tuple[float, float, float]:
    """Write a checkpoint with its sums; return the seconds of saving, of sums, and of their CPU."""
    each = megabytes * 250_000 // TENSORS
    state = {f"module.{at}": torch.randn(each) for at in range(TENSORS)}
    weights = folder / "weights"
    weights.mkdir(parents=True)
    began = time.perf_counter()
    save(state, storage_writer=FileSystemWriter(weights, thread_count=files), no_dist=True)
    torch.save({"content_metadata": {}}, weights / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(weights))
    saved, processed = time.perf_counter(), time.process_time()
    sums = described(folder)
    took, processed = time.perf_counter() - saved, time.process_time() - processed
    facts_of_it = {"step": 1, "max_steps": 1, "tokenizer": "", "files": for_marker(sums)}
    (folder / "longhaul.json").write_text(json.dumps(facts_of_it))
    return saved - began, took, processed


def load(folder: Path, megabytes: int, *, verify: bool) -> None:
    """Load a checkpoint as every reader does."""
    each = megabytes * 250_000 // TENSORS
    names = [f"module.{at}" for at in range(TENSORS)]
    wanted = {name: ShardedTensor.from_rank_offsets(name, torch.empty(each)) for name in names}
    with verified(folder, verify=verify):
        dist_checkpointing.load(wanted, str(folder / "weights"), validate_access_integrity=False)


def store(folder: Path, megabytes: int) -> Manifest:
    """Write a store whose train split is made up; an index entry of 20 bytes for 4,096 tokens."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / TOKENIZER_FILE).write_text("{}")
    draws = np.random.default_rng(0)
    documents = megabytes * 1_000_000 // 8_192
    for name, size in (("train", megabytes), ("heldout", 1)):
        with (folder / f"{name}.bin").open("wb") as file:
            for _ in range(size):
                file.write(draws.bytes(1_000_000))
        (folder / f"{name}.idx").write_bytes(draws.bytes(20 * documents * size // megabytes))
    splits = {
        name: Split(
            parts=(
                Part(
                    source="documents",
                    documents=1,
                    tokens=1,
                    longest=1,
                    lengths=(LengthBucket(at_least=1, documents=1, tokens=1),),
                    bins=(StoredFile.of(folder, f"{name}.bin"),),
                    idx=StoredFile.of(folder, f"{name}.idx"),
                ),
            )
        )
        for name in ("train", "heldout")
    }
    manifest = Manifest(
        root=folder,
        sources=(SourceFacts(name="documents", kind="documents", origin="made up"),),
        heldout_fraction=0.1,
        seed=0,
        tokenizer=TokenizerFacts(
            name="none", fingerprint=tokenizer_fingerprint(folder / "tokenizer"), vocab_size=1,
            eod_id=0,
        ),
        skipped={},
        blocks=verification.write_blocks(folder, ["train.bin", "heldout.bin"]),
        train=splits["train"],
        heldout=splits["heldout"],
    )  # fmt: skip
    manifest.write()
    return manifest


def in_turn(run: Sequence[Callable[[], object]], rounds: int) -> list[list[Seconds]]:
    """Return the seconds of each of several things in each round, done in turn."""
    times: list[list[Seconds]] = [[] for _ in run]
    for each in run:
        each()  # what is read is in the page cache from now on
    for _ in range(rounds):
        for each, seconds in zip(run, times, strict=True):
            began = time.perf_counter(), time.process_time()
            each()
            seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return times


def row(what: str, how: str, times: Sequence[Sequence[Seconds]]) -> list[str]:
    """Return a row of the table: medians, what the second takes longer, and every round."""
    without, compared = (
        [statistics.median(kind) for kind in zip(*of, strict=True)] for of in times
    )
    shown = "; ".join(" ".join(f"{seconds:.2f}" for seconds, _ in of) for of in times)
    figures = (without[0], compared[0], compared[0] - without[0], compared[1] - without[1])
    return [what, how, *(f"{figure:.2f}" for figure in figures), shown]


def measured(folder: Path, megabytes: int, rounds: int) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for files, what in ((2, "checkpoint in two files"), (1, "checkpoint in one file")):
        where = folder / f"checkpoint{files}"
        saved, sums, processed = checkpoint(where, megabytes, files)
        times = in_turn(
            [
                lambda where=where: load(where, megabytes, verify=False),  # type: ignore[misc]
                lambda where=where: load(where, megabytes, verify=True),  # type: ignore[misc]
            ],
            rounds,
        )
        rows.append(row(what, "loaded by Megatron", times))
        figures = (saved, saved + sums, sums, processed)
        rows.append([what, "saved, once", *(f"{figure:.2f}" for figure in figures), ""])
    manifest = store(folder / "store", megabytes)
    for how, whole in (("a sample of blocks", False), ("whole", True)):
        times = in_turn(
            [
                lambda: Manifest.load(manifest.root),
                lambda whole=whole: verification.verify(  # type: ignore[misc]
                    Manifest.load(manifest.root), whole=whole
                ),
            ],
            rounds,
        )
        rows.append(row("token store", f"opened; {how}", times))
    return rows


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, default=1000, help="size of checkpoint and store")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's, of one process
    logging.disable(logging.WARNING)  # that --no-verify was asked for
    with tempfile.TemporaryDirectory(prefix="verification-") as folder, one_rank():
        rows = measured(Path(folder), given.mb, given.rounds)
    title = f"Verification of {given.mb:,} MB"
    load_average = {"load over a minute": f"{os.getloadavg()[0]:.1f}"}  # the seconds grow with it
    text = page(title, facts(("megatron-core",)) | load_average, [table(HEAD, rows)])
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
