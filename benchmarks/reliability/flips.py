# SPDX-License-Identifier: Apache-2.0
"""Whether flipped bits, cuts, missing and exchanged files are detected, and by name.

    python -m benchmarks.reliability.flips
    python -m benchmarks.reliability.flips --flips 20 --cuts 8 --seed 3

Claim: each is refused with a message that names the file, and none is used.

A stage of the tiny model is trained for three steps on two gloo ranks by `longhaul pretrain`. Then
one bit of one file of its checkpoint or its store is flipped, or a file is cut, removed or
exchanged with another, and put back after the readers have been asked. Files are taken in turn, so
that each has its share, bits and lengths are drawn. Readers are, in the order of a command: of a
checkpoint what commands check before they start ranks (`require_whole`), the read with its
checksums (`verified`, which a resume, an evaluation and an export share) of every tensor, and
`longhaul export` in this process; of a store the manifest and what commands verify before they
start ranks; of the order of samples that Megatron keeps in the store, what a training checks before
it reads it, which removes the files to build them again. NeMo's `context/` holds pickles that
Longhaul never reads; its sums are compared alone.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.reliability.bad_inputs import installed
from benchmarks.reliability.killed_run import SAVE_EVERY, Run, write_store
from custom_modules.checkpoints.index import CheckpointError
from data.store import Manifest, StoreError
from data.token_files import cached_order, verification
from recipes.checkpoints.files import CONTEXT, require_undamaged, require_whole
from recipes.checkpoints.marker import MARKER, newest_checkpoint
from recipes.checkpoints.verified import one_rank, verified

CUTS = ("cut", "removed", "exchanged")
KINDS = (
    (".distcp", "weights and optimizer"), (".metadata", "index of the weights"),
    ("weights/", "other files of the weights"), (MARKER, "marker"),
    (f"{CONTEXT}/", "context, never read"), ("reproduce/", "record of how it was made"),
    ("layout.json", "layout that wrote it"), ("manifest.json", "manifest"), (".bin", "token files"),
    (".idx", "token index"), ("blocks.json", "sums of blocks"),
    ("tokenizer/tokenizer.json", "tokenizer"), ("tokenizer/", "other files of the tokenizer"),
    ("index/", "order of samples, built again"),
)  # fmt: skip
"""Part of a file's name, and what the file is; the first that fits."""


class Answer(NamedTuple):
    """What a reader said of a damaged file."""

    reader: str
    said: str
    """Nothing where it was read."""


class Case(NamedTuple):
    """A damage and the answers to it, up to the first reader that refuses."""

    file: str
    damage: str
    others: tuple[str, ...]
    """Further files that it changed."""
    answers: tuple[Answer, ...]
    used: str
    """What was read otherwise than it was written, where no reader refused."""

    @property
    def refused(self) -> Answer | None:
        """The first answer that refuses."""
        return next((answer for answer in self.answers if answer.said), None)

    @property
    def is_named(self) -> bool:
        """Whether the first refusal has the name of a file that was changed."""
        said = "" if self.refused is None else self.refused.said
        return any(name in said for name in (self.file, *self.others))


def kind_of(name: str) -> str:
    """Return what a file is."""
    return next(words for part, words in KINDS if part in name)


def files_of(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextmanager
def damaged(
    folder: Path, name: str, damage: str, draw: random.Random
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Damage a file for the block; yield what was done, and which other files have changed."""
    path, before = folder / name, {each: (folder / each).read_bytes() for each in files_of(folder)}
    content = before[name]
    others = [each for each, of_it in before.items() if of_it != content]
    other = min(others, key=lambda each: abs(len(before[each]) - len(content)))
    try:
        if damage == "flip":
            at, bit = draw.randrange(len(content)), draw.randrange(8)
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            yield f"bit {bit} of byte {at:,} of {len(content):,}", ()
        elif damage == "cut":
            left = draw.randrange(len(content))
            path.write_bytes(content[:left])
            yield f"cut to {left:,} of {len(content):,} bytes", ()
        elif damage == "removed":
            path.unlink()
            yield "removed", ()
        else:
            path.write_bytes(before[other])
            (folder / other).write_bytes(content)
            yield f"exchanged with {other}", (other,)
    finally:
        for each, of_it in before.items():
            if not (folder / each).exists() or (folder / each).read_bytes() != of_it:
                (folder / each).write_bytes(of_it)


class Checkpoint:
    """A checkpoint, and what reads it."""

    def __init__(self, folder: Path, out: Path) -> None:
        """Read it as it was saved."""
        self.folder, self.out = folder, out
        self._command = installed()
        self.tensors = self._tensors()

    def readers(self, name: str) -> dict[str, Callable[[], Any]]:
        """Return what reads a file, in the order of a command."""
        if name.startswith(f"{CONTEXT}/"):
            return {"its sums": lambda: require_undamaged(self.folder, CONTEXT)}
        return {"before ranks": self._before_ranks, "read": self._tensors, "export": self._export}

    def is_as_written(self) -> bool:
        """Whether every tensor, and the marker, are those that were saved."""
        import torch

        found = self._tensors()
        return found.keys() == self.tensors.keys() and all(
            torch.equal(found[key], self.tensors[key]) for key in found
        )

    def _before_ranks(self) -> None:
        newest = newest_checkpoint(self.folder.parent)
        if newest != self.folder:
            raise CheckpointError(f"{self.folder / MARKER} is not there: {newest} is the newest")
        require_whole(newest)

    def _tensors(self) -> dict[str, Any]:
        from megatron.core import dist_checkpointing

        with verified(self.folder):
            found: dict[str, Any] = dist_checkpointing.load_plain_tensors(
                str(self.folder / "weights")
            )
            return found

    def _export(self) -> None:
        sys.argv = ["longhaul", "export", "--from", str(self.folder), "--to", str(self.out)]
        said = io.StringIO()
        code: object = 0
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                self._command()
            except SystemExit as end:
                code = end.code or 0
        if self.out.exists():
            shutil.rmtree(self.out)
            if code:
                raise RuntimeError(f"a refused export left {self.out}")
        if code:
            raise CheckpointError(said.getvalue())


class Store:
    """A store, and what reads it."""

    def __init__(self, folder: Path) -> None:
        """Take the folder."""
        self.folder = folder
        self.manifest = Manifest.load(folder)

    def readers(self, name: str) -> dict[str, Callable[[], Any]]:
        """Return what reads a file, in the order of a command."""
        if name.startswith("index/"):
            order = re.sub(r"-[a-z_]+\.\w+$", "", Path(name).name)
            return {"order": lambda: self._order(order)}
        return {
            "manifest": lambda: Manifest.load(self.folder),
            "before ranks": lambda: verification.verify(Manifest.load(self.folder)),
            "--verify": lambda: verification.verify(Manifest.load(self.folder), whole=True),
        }

    def _order(self, name: str) -> None:
        cached_order.read(self.folder / "index", name)

    def is_as_written(self) -> bool:
        """Whether the manifest says what was written; files have no damage that is not refused."""
        return Manifest.load(self.folder) == self.manifest


def asked(reader: str, read: Callable[[], Any]) -> Answer:
    """Return what a reader says; raise what is not a refusal."""
    try:
        read()
    except (CheckpointError, StoreError) as error:
        return Answer(reader, str(error))
    return Answer(reader, "")


def case(of: Checkpoint | Store, name: str, damage: str, draw: random.Random) -> Case:
    """Damage a file and ask the readers, up to the first that refuses."""
    answers: list[Answer] = []
    with damaged(of.folder, name, damage, draw) as (words, others):
        for reader, read in of.readers(name).items():
            answers.append(asked(reader, read))
            if answers[-1].said:
                break
        used = "" if answers[-1].said or of.is_as_written() else "what is read is another"
    return Case(name, words, others, tuple(answers), used)


def cases(
    places: list[Checkpoint | Store], flips: int, cuts: int, draw: random.Random
) -> Iterator[Case]:
    """Yield the cases: kinds of files in turn, and a file of the kind by chance."""
    for place in places:
        kinds: dict[str, list[str]] = {}
        for name in files_of(place.folder):
            if (place.folder / name).stat().st_size:
                kinds.setdefault(kind_of(name), []).append(name)
        turns = cycle(kinds.values())
        damages = ["flip"] * (flips // len(places)) + [
            CUTS[at % len(CUTS)] for at in range(cuts // len(places))
        ]
        for damage in damages:
            yield case(place, draw.choice(next(turns)), damage, draw)


def trained(folder: Path) -> tuple[Path, Path]:
    """Train a stage for three steps; return its checkpoint and its store."""
    store = write_store(folder)
    run = Run(folder / "run", store, SAVE_EVERY)
    run.start()
    run.finish()
    return run.checkpoints / f"step={SAVE_EVERY}", store


def rows_of(found: list[Case]) -> list[list[str]]:
    """Return a row for each kind of file."""
    rows = []
    for kind in (*dict.fromkeys(kind_of(each.file) for each in found), "all"):
        of = [each for each in found if kind in (kind_of(each.file), "all")]
        flips = sum(each.damage.startswith("bit") for each in of)
        first = [each.refused.reader for each in of if each.refused is not None]
        rows.append(
            [
                kind, "", str(flips), str(len(of) - flips),
                *(str(first.count(reader)) for reader in READERS),
                str(sum(each.is_named for each in of)),
                str(sum(each.refused is None for each in of)),
                str(sum(bool(each.used) for each in of)),
            ]
        )  # fmt: skip
    return rows


READERS = ("manifest", "before ranks", "read", "export", "--verify", "its sums", "order")


def main() -> None:
    """Damage, ask, and write the page; exit with 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="flips-") as name, one_rank():
        checkpoint, store = trained(Path(name).resolve())
        places: list[Checkpoint | Store] = [
            Checkpoint(checkpoint, Path(name) / "exported"),
            Store(store),
        ]
        began = time.monotonic()
        draw = random.Random(given.seed)
        found = list(cases(places, given.flips, given.cuts, draw))
        seconds = time.monotonic() - began
    wrong = [each for each in found if each.used or (each.refused and not each.is_named)]
    harmless = [each for each in found if each.refused is None and not each.used]
    head = ["file", "", "flips", "cuts", *READERS, "named", "not refused", "used"]
    listed = [
        f"* {each.file}, {each.damage}: {each.used or each.refused}".replace("\n", " ")
        for each in wrong
    ] + [
        f"* {each.file}, {each.damage}: not refused; what is read is the same" for each in harmless
    ]
    text = page(
        "Bit flips and cuts of a checkpoint and a store",
        {
            **facts(("megatron-core",)),
            "load over a minute": f"{os.getloadavg()[0]:.1f}",
        },
        [
            f"Seed {given.seed}; {seconds:.0f} s for {len(found)} damages. The columns of readers "
            "count which refused first; `named` has the refusals that name the file.",
            table(head, rows_of(found)),
            *listed,
        ],
    )
    sys.stdout.write(text)
    print(json.dumps([len(wrong), len(harmless)]), file=sys.stderr)
    if given.out is not None:
        write(given.out, text)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
