# SPDX-License-Identifier: Apache-2.0
"""Which rows, and so which documents, each step of a stage trains on.

    step -> rows of each group (`Schedule`) -> packed rows (`Rows`) -> pieces of documents

The k-th row that a group gives to the stage is the k-th of a seeded permutation of its packed rows,
another one for each time that it has given them all. In a step of another length L a sequence of S
tokens is S / L packed rows of L tokens end to end, so that tensors keep their shapes; attention
stays within documents there, which is why such a step costs and trains what sequences of L do.

Everything follows from (mix, store, seed, steps, rows of a step), so it is the same after a resume
and on any number of ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.mixture.config import Mix
from data.mixture.groups import Group, applies, groups, needs
from data.mixture.schedule import Schedule
from data.packing.permutation import permuted
from data.packing.rows import Request, Rows, packed
from data.store import Manifest

SEED = 1234
"""Seed of a stage's data unless the recipe states another."""
PADDING = -1
"""Number of the document that padding is of."""


class RowRef(NamedTuple):
    """A row of a step: its group, and its number among all rows that the group gives."""

    group: int
    number: int


class PackedSequence(NamedTuple):
    """The pieces of a sequence of the stage's length, padding included."""

    part: int
    """Number of the part in the train split."""
    documents: NDArray[np.int64]
    """Number of the document in its part, or `PADDING`."""
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageRows:
    """The packed rows of a stage, and their schedule."""

    seq_length: int
    seed: int
    steps: int
    groups: tuple[Group, ...]
    packed: tuple[Rows, ...]
    schedule: Schedule
    parts: tuple[int, ...]
    """Number of the part in the train split, of each group."""

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        mix: Mix,
        *,
        seq_length: int,
        steps: int,
        rows: int,
        seed: int,
        document_lengths: Iterable[NDArray[np.integer[Any]]] | None,
    ) -> "StageRows":
        """Return the rows of a stage of `steps` steps of `rows` sequences; pack what is not yet.

        `document_lengths` are the tokens [n] of the documents of each part of the train split; with
        None nothing is packed. Raises MixError for a mix that the store cannot have, and
        NotPackedError for rows that are not packed and may not be.
        """
        mix = for_store(mix, manifest)
        found = groups(mix, manifest, seq_length)
        needs(mix, found, steps * rows * seq_length)
        parts = {part.source: number for number, part in enumerate(manifest.train.parts)}
        lengths = None if document_lengths is None else list(document_lengths)
        each = []
        for group in found:
            part = manifest.train.parts[parts[group.source]]
            request = _request(mix, group, part.idx.sha256, seq_length, seed)
            of_part = None if lengths is None else lengths[parts[group.source]]
            each.append(packed(manifest.root / "index", request, of_part))
        schedule = Schedule.of(
            mix, found, steps=steps, rows=rows, filled=[one.filled for one in each]
        )
        numbers = tuple(parts[group.source] for group in found)
        return cls(seq_length, seed, steps, found, tuple(each), schedule, numbers)

    def step(self, number: int) -> list[RowRef]:
        """Return the rows of a step; beyond the last step the schedule begins again."""
        return [
            RowRef(group, row) for group, rows in enumerate(self._rows_of(number)) for row in rows
        ]

    def tokens(self, number: int) -> NDArray[np.int64]:
        """Return the tokens [groups] of the documents of a step, padding left out."""
        found = np.zeros(len(self.groups), np.int64)
        for group, rows in enumerate(self._rows_of(number)):
            if rows:
                found[group] = self.packed[group].tokens_of(self._places(group, np.array(rows)))
        return found

    def _rows_of(self, number: int) -> list[range]:
        """Return the numbers of each group's rows in a step."""
        around, at = divmod(number, self.steps)
        total = self.schedule.before[-1] + self.schedule.counts[-1]
        firsts = (self.schedule.before[at] + around * total).tolist()
        counts = self.schedule.counts[at].tolist()
        return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]

    def work(self, refs: Sequence[RowRef]) -> list[float]:
        """Return the sum of squared lengths of the pieces of each row."""
        found = np.empty(len(refs))
        of_group = np.array([ref.group for ref in refs])
        numbers = np.array([ref.number for ref in refs])
        for group in np.unique(of_group).tolist():
            own = of_group == group
            places = self._places(group, numbers[own])
            found[own] = self.packed[group].work[places].reshape(own.sum(), -1).sum(1)
        return [float(work) for work in found]

    def sequence(self, ref: RowRef) -> PackedSequence:
        """Return the pieces of a row, in order; one of another length joins packed rows."""
        rows = self.packed_rows(ref)
        columns = zip(*((row.documents, row.offsets, row.lengths) for row in rows), strict=True)
        return PackedSequence(self.parts[ref.group], *map(np.concatenate, columns))

    def packed_rows(self, ref: RowRef) -> list[PackedSequence]:
        """Return the packed rows that a row is made of, each with its padding."""
        rows = self.packed[ref.group]
        found = []
        for place in self._places(ref.group, np.array([ref.number])).tolist():
            pieces = rows.row(place)
            rest = rows.request.row_length - int(pieces.lengths.sum())
            padding = ([PADDING], [0], [rest]) if rest else ([], [], [])
            columns = [
                np.concatenate([values, np.array(more, np.int64)])
                for values, more in zip(pieces, padding, strict=True)
            ]
            found.append(PackedSequence(self.parts[ref.group], *columns))
        return found

    @property
    def most_pieces(self) -> int:
        """Pieces of a sequence at most, padding included."""
        each = [
            (rows.most_pieces + 1) * (self.seq_length // rows.request.row_length)
            for rows in self.packed
        ]
        return min(self.seq_length, max(each))

    def _places(self, group: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the packed rows that rows of the stage are made of, one after the other."""
        rows = self.packed[group]
        each = self.seq_length // rows.request.row_length
        parts = (numbers[:, None] * each + np.arange(each)).reshape(-1)
        rounds = parts // rows.rows
        places = np.empty(parts.size, np.int64)
        for number in np.unique(rounds).tolist():
            own = rounds == number
            key = (self.seed, group, number)
            places[own] = permuted(parts[own] % rows.rows, rows.rows, key)
        return places


def mix_of(stated: Mix | None, manifest: Manifest) -> Mix | None:
    """Return the mix that a stage has on a store; None for one source as Megatron cuts it.

    Without a mix, several sources are cut end to end, each with a share by its tokens.
    """
    several = len(manifest.train.parts) > 1
    return Mix(packing="cut") if stated is None and several else stated


def for_store(mix: Mix, manifest: Manifest) -> Mix:
    """Return a mix for a store: without shares if the store has one source without a name."""
    return mix if applies(mix, manifest) else replace(mix, shares=())


def _request(mix: Mix, group: Group, sha256: str, seq_length: int, seed: int) -> Request:
    most = mix.documents_per_row
    if most is not None:
        most = max(1, most * group.seq_length // seq_length)
    return Request(
        lengths_sha256=sha256,
        at_least=group.at_least,
        below=group.below,
        row_length=group.seq_length,
        packing=mix.packing,
        documents_per_row=most,
        overlap=mix.overlap,
        seed=seed,
        between=group.between,
    )
