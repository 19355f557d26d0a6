# SPDX-License-Identifier: Apache-2.0
"""The sequences of a mixed stage as a dataset: one rank reads the tokens that it computes on.

Sample n is a row of step n // B, where B is the sequences of a step. Which one follows from the
work of the step's rows (`data.packing.balance`) and from where Megatron's sampler takes sample n:
micro-batch by micro-batch, and in each a run of samples for every data rank. The rows of a step are
thus the same under any layout.

Of a row of S tokens, context rank c of C reads chunks c and 2C - 1 - c of 2C, as zigzag context
parallelism divides them, and one token after each for the label. Document boundaries are of the
whole row, and come from the index of rows: no token is looked at for them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.mixture.stage_rows import PADDING, PackedSequence, RowRef, StageRows
from data.packing.balance import balanced, imbalance

if TYPE_CHECKING:
    from data.token_files.stored_documents import StoredDocuments


class MixedDataset(Dataset[dict[str, Tensor]]):
    """The training samples of a stage with a mix, of one context rank."""

    def __init__(
        self,
        rows: StageRows,
        files: Sequence["StoredDocuments"],
        *,
        within: bool,
        data_ranks: int,
        micro_batch: int,
        context: tuple[int, int] = (0, 1),
        eod_id: int,
        separator_id: int | None = None,
    ) -> None:
        """Take the rows of the stage and its files.

        Args:
            files: the documents of each part of the train split.
            within: whether tokens attend within their document only.
            context: this context rank and the number of them.
            separator_id: token that ends each document in place of `eod_id`.

        Raises ValueError if the sequence does not divide into zigzag chunks.
        """
        rank, ranks = context
        chunk, rest = divmod(rows.seq_length, 2 * ranks)
        if rest and ranks > 1:
            raise ValueError(
                f"sequences of {rows.seq_length:,} tokens do not divide into {2 * ranks} chunks "
                f"of {ranks} context ranks"
            )
        self.rows = rows
        self.files = files
        self.within = within
        self.data_ranks, self.micro_batch = data_ranks, micro_batch
        self.eod_id = eod_id
        self.separator_id = eod_id if separator_id is None else separator_id
        self.sequences = int(rows.schedule.counts[0].sum())
        self.spans = [(0, rows.seq_length)]
        if ranks > 1:
            firsts = (rank * chunk, (2 * ranks - 1 - rank) * chunk)
            self.spans = [(first, first + chunk) for first in firsts]
        self.passed_over: tuple[tuple[int, int], ...] = ()
        """Windows of samples to skip: the first sample and the count of each."""
        self.window: int | None = None
        """Tokens that a token attends to in the model's local layers; None if it has none."""
        self.bytes_read = 0
        """Bytes of tokens that this process has read."""
        self._shares = lru_cache(maxsize=4)(self._balanced)

    def __len__(self) -> int:
        """Return the samples of the stage; any number may be asked for."""
        return self.rows.steps * self.sequences

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return this rank's part of a sample.

        tokens, labels, position_ids int64 [s] and loss_mask float32 [s], with s = S / C;
        `document_lengths` int32 [most], zeros after the last, of the whole sequence if tokens
        attend within documents; `sample_id`, and `sharded` as a mark that s is a rank's share.
        For the step log: `source`, the number of its part of the train split, and `row_facts` [3],
        or [4] with a window, of the whole sequence (`custom_modules.metrics.tally`).
        """
        sequence = self.rows.sequence(self.row_of(number))
        ends = np.cumsum(sequence.lengths)
        begins = ends - sequence.lengths
        columns = [self._span(sequence, begins, ends, *span) for span in self.spans]
        tokens, labels, mask, positions = (
            torch.from_numpy(np.concatenate(parts)) for parts in zip(*columns, strict=True)
        )
        sample = {
            "tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions,
            "sample_id": torch.tensor(number), "sharded": torch.tensor(True),
            "source": torch.tensor(sequence.part), "row_facts": self._row_facts(sequence),
        }  # fmt: skip
        if self.within:
            table = np.zeros(self.rows.most_pieces, np.int32)
            table[: sequence.lengths.size] = sequence.lengths
            sample["document_lengths"] = torch.from_numpy(table)
        return sample

    def _row_facts(self, sequence: PackedSequence) -> Tensor:
        """Return pieces of documents, the sum of squares of what tokens attend within, padding."""
        lengths = sequence.lengths[sequence.documents != PADDING]
        tokens = int(lengths.sum())
        attended = torch.from_numpy(lengths) if self.within else torch.tensor([tokens])
        facts = [lengths.size, squared(attended), self.rows.seq_length - tokens]
        if self.window is not None:
            facts.append(squared(attended, self.window))
        return torch.tensor(facts)

    def row_of(self, number: int) -> RowRef:
        """Return the row that a sample is."""
        step, place = divmod(self._place(number), self.sequences)
        of_micro_batch = self.data_ranks * self.micro_batch
        at, within = divmod(place, of_micro_batch)
        rank, slot = divmod(within, self.micro_batch)
        refs, shares = self._shares(step)
        return refs[shares[rank][at * self.micro_batch + slot]]

    def _place(self, number: int) -> int:
        """Return the place of a sample in the schedule.

        A window that is skipped is in the numbers of the run that found it, so earlier windows
        shift later ones.
        """
        return number + sum(count for first, count in self.passed_over if number >= first)

    def documents_of(self, number: int) -> tuple[int, list[int]]:
        """Return the part of the train split that a sample is of, and its documents in it."""
        sequence = self.rows.sequence(self.row_of(number))
        found = sequence.documents[sequence.documents != PADDING]
        return sequence.part, [int(one) for one in dict.fromkeys(found.tolist())]

    def facts(self, step: int) -> dict[str, Any]:
        """Return what the log of a step says about its data; steps count from 0."""
        refs, shares = self._shares(self._place(step * self.sequences) // self.sequences)
        rows: dict[str, int] = {}
        for ref in refs:
            words = self.rows.groups[ref.group].words
            rows[words] = rows.get(words, 0) + 1
        facts: dict[str, Any] = {"rows_by_source": rows}
        length = self.rows.groups[refs[0].group].seq_length
        if length != self.rows.seq_length:
            facts["seq_length"] = length
        if self.within:
            facts["work_max_over_mean"] = imbalance(self._work(refs), shares)
        return facts

    def _balanced(self, step: int) -> tuple[list[RowRef], list[list[int]]]:
        refs = self.rows.step(step)
        return refs, balanced(self._work(refs), self.data_ranks)

    def _work(self, refs: list[RowRef]) -> list[float]:
        """Return the work of rows: all the same if tokens attend across documents."""
        return self.rows.work(refs) if self.within else [1.0] * len(refs)

    def _span(
        self,
        sequence: PackedSequence,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        first: int,
        end: int,
    ) -> tuple[NDArray[Any], ...]:
        """Return tokens, labels, loss mask and positions of the tokens `first` to `end`."""
        S = self.rows.seq_length
        tokens = np.full(end - first + 1, self.eod_id, np.int64)
        mask = np.ones(end - first, np.float32)
        positions = np.arange(first, end)
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(begins, min(end + 1, S)))
        for piece in range(low, high):
            begin, stop = int(begins[piece]), int(ends[piece])
            part = slice(max(begin, first) - first, min(stop, end) - first)
            if self.within:
                positions[part] -= begin
            if sequence.documents[piece] == PADDING:
                mask[part] = 0
            else:
                until = min(stop, end + 1)
                tokens[max(begin, first) - first : until - first] = self._read(
                    sequence, piece, max(begin, first) - begin, until - begin
                )
            last = stop - 1
            no_label = last == S - 1 or self.within or sequence.documents[piece + 1] == PADDING
            if no_label and first <= last < end:
                mask[last - first] = 0
        return tokens[:-1], tokens[1:], mask, positions

    def _read(self, sequence: PackedSequence, piece: int, first: int, end: int) -> NDArray[Any]:
        """Return the tokens `first` to `end` of a piece."""
        document, offset = int(sequence.documents[piece]), int(sequence.offsets[piece])
        file = self.files[sequence.part]
        tokens = file.get(document, offset=offset + first, length=end - first)
        self.bytes_read += tokens.nbytes
        if self.separator_id != self.eod_id and tokens.size:
            size = int(file.sequence_lengths[document])
            if offset + end == size and tokens[-1] == self.eod_id:
                tokens = tokens.copy()
                tokens[-1] = self.separator_id
        return tokens


def squared(lengths: Tensor, window: int | None = None) -> int:
    """Return the sum of squared lengths [n]; with a window, of what its pairs of tokens add up to.

    Of a document of l tokens with a window of W below l, that is 2 W l - W^2.
    """
    if window is None:
        return int((lengths**2).sum())
    inside = lengths.clamp(max=window)
    return int((inside * (2 * lengths - inside)).sum())
