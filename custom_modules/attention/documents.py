# SPDX-License-Identifier: Apache-2.0
"""Document boundaries of a packed sequence, on the whole sequence and on a zigzag shard.

    mask[i, j] = document(i) == document(j)        (and j <= i if attention is causal)

A mask of [S, S] is never formed: attention within documents is attention over runs of tokens. On
a sequence that C ranks share by zigzag (chunks r and 2C - 1 - r of 2C on rank r) two facts keep it
as simple, for documents of any length, without padding:

1. the two chunks of a rank, put together, are again a packed sequence: a document that spans both
   covers everything between, so its two pieces are neighbours (`Documents.shard`);
2. between two different chunks at most one document is shared: one that reaches both covers the
   end of the earlier and the beginning of the later (`Documents.shared`).

So a step of ring attention needs one packed call on the rank's own chunks, and at most one
rectangle for each pair of chunks after that.

Legend: S tokens of a sequence, C ranks, b sequences of a batch, each with its own documents.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import index
from typing import ClassVar

import torch
from torch import Tensor

Span = tuple[int, int]
"""First token, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of each sequence of a batch, as their lengths in order.

    All rows add up to the length of the sequence. A document may have a single token; none may be
    empty.
    """

    lengths: tuple[tuple[int, ...], ...]
    bounds: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Cumulative lengths of each sequence, from 0 to S."""
    _cu_seqlens: dict[torch.device, Tensor] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _shards: dict[tuple[int, int], "Documents"] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _apart: dict[tuple[int, int], "Documents"] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _cuts: dict[int, "Documents"] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    qkv_format: ClassVar[str] = "sbhd"
    """Read by Megatron-Core as a field of packed_seq_params: tensors stay [s, b, h, D]."""
    cp_group: ClassVar[None] = None
    """Read so too, from Megatron-Core 0.17 on: the context ranks are those of the model."""

    def __post_init__(self) -> None:
        """Refuse empty documents, and rows of different lengths."""
        bounds = tuple(tuple(accumulate(row, initial=0)) for row in self.lengths)
        object.__setattr__(self, "bounds", bounds)
        if not self.lengths:
            raise ValueError("a document table has no sequence; it needs a row for each")
        for row, lengths in enumerate(self.lengths):
            if not lengths or min(lengths) < 1:
                raise ValueError(
                    f"sequence {row} has the document lengths {list(lengths)}; each is at least 1"
                )
            if bounds[row][-1] != bounds[0][-1]:
                raise ValueError(
                    f"the documents of sequence {row} add up to {bounds[row][-1]:,} tokens, those "
                    f"of sequence 0 to {bounds[0][-1]:,}; sequences of a batch have one length"
                )

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Documents":
        """Return the table of documents with these lengths."""
        return cls(tuple(tuple(index(length) for length in row) for row in rows))

    @classmethod
    def from_starts(cls, starts: Tensor) -> "Documents":
        """Return the table for `starts` [b, S], true at the first token of each document.

        The first token of a sequence always begins a document.
        """
        if starts.ndim != 2:
            raise ValueError(f"document starts have shape {list(starts.shape)}; [b, S] is needed")
        length = starts.shape[1]
        rows = []
        for row in starts.bool().cpu():
            begins = sorted({0, *row.nonzero().flatten().tolist()})
            rows.append([b - a for a, b in zip(begins, [*begins[1:], length], strict=True)])
        return cls.of(rows)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, *, batch: int, seq_length: int) -> "Documents":
        """Return the table for cumulative lengths [n + 1] over `batch` sequences laid end to end.

        Raises ValueError unless they begin at 0, increase, and add up to the sequences.
        """
        if cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} of {cu_seqlens.numel()} entries; integers from "
                "0 to the end of each document are needed"
            )
        bounds = cu_seqlens.tolist()
        if bounds[:1] != [0] or bounds[-1] != batch * seq_length:
            raise ValueError(
                f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to "
                f"{batch * seq_length:,}, {batch} sequences of {seq_length:,} tokens"
            )
        rows: list[list[int]] = [[] for _ in range(batch)]
        for start, stop in pairwise(bounds):
            if stop <= start:
                raise ValueError(f"cu_seqlens does not rise: {stop} follows {start}")
            if start // seq_length != (stop - 1) // seq_length:
                raise ValueError(
                    f"the document of tokens {start} to {stop} crosses the end of a sequence of "
                    f"{seq_length:,} tokens"
                )
            rows[start // seq_length].append(stop - start)
        return cls.of(rows)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def seq_length(self) -> int:
        """Tokens of each sequence."""
        return self.bounds[0][-1]

    @property
    def max_seqlen_q(self) -> int:
        """Positions of a rotary table for consecutive positions; read by Megatron-Core."""
        return self.seq_length

    max_seqlen_kv = max_seqlen_q

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(max(row) for row in self.lengths)

    def spans(self, row: int) -> Iterator[Span]:
        """Yield the documents of a sequence."""
        yield from pairwise(self.bounds[row])

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Return cumulative lengths, int32 [documents + 1], of the sequences laid end to end."""
        if device not in self._cu_seqlens:  # every layer asks, forward and backward
            lengths = torch.tensor([0, *(length for row in self.lengths for length in row)])
            self._cu_seqlens[device] = lengths.cumsum(0).to(device=device, dtype=torch.int32)
        return self._cu_seqlens[device]

    def position_ids(self) -> Tensor:
        """Return positions [b, S] that restart at each document."""
        rows = [torch.cat([torch.arange(length) for length in row]) for row in self.lengths]
        return torch.stack(rows)

    def apart(self, rank: int, size: int) -> "Documents":
        """Return the documents of a zigzag shard whose two chunks stay apart, the first's first."""
        if (rank, size) not in self._apart:  # every layer asks, forward and backward
            chunks = chunks_of(rank, size)
            rows = [
                [length for c in chunks for length in self._joined(row, (c,), size)]
                for row in range(self.batch)
            ]
            self._apart[rank, size] = Documents.of(rows)
        return self._apart[rank, size]

    def cut(self, length: int) -> "Documents":
        """Return the table in which documents are cut into pieces of `length`, the last shorter."""
        if length not in self._cuts:  # every layer asks, forward and backward
            rows = (
                [
                    piece
                    for whole, rest in (divmod(one, length) for one in row)
                    for piece in (*[length] * whole, rest)
                    if piece
                ]
                for row in self.lengths
            )
            self._cuts[length] = Documents.of(list(rows))
        return self._cuts[length]

    def require(self, *, batch: int, seq_length: int) -> None:
        """Raise ValueError unless the table is of sequences of this number and length."""
        if (self.batch, self.seq_length) != (batch, seq_length):
            raise ValueError(
                f"the document table covers {self.batch} sequences of {self.seq_length:,} tokens, "
                f"attention is over {batch} of {seq_length:,}; the lengths of a row must add up "
                "to its sequence"
            )

    def shard(self, rank: int, size: int) -> "Documents":
        """Return the documents of the zigzag shard of `rank` among `size`: its chunks joined."""
        if (rank, size) not in self._shards:  # every layer asks, forward and backward
            chunks = chunks_of(rank, size)
            rows = [self._joined(row, chunks, size) for row in range(self.batch)]
            self._shards[rank, size] = Documents.of(rows)
        return self._shards[rank, size]

    def _joined(self, row: int, chunks: Sequence[int], size: int) -> list[int]:
        chunk = self.seq_length // (2 * size)
        kept = []
        for start, stop in self.spans(row):
            inside = (max(0, min(stop, (c + 1) * chunk) - max(start, c * chunk)) for c in chunks)
            kept.append(sum(inside))
        return [length for length in kept if length]

    def shared(self, row: int, q_chunk: int, k_chunk: int, size: int) -> tuple[Span, Span] | None:
        """Return the tokens of two different chunks that lie in one document, or None.

        Spans are within each chunk. The sequence has 2 * `size` chunks.
        """
        chunk = self.seq_length // (2 * size)
        early, late = sorted((q_chunk, k_chunk))
        bounds = self.bounds[row]
        # Only the document of the early chunk's last token can reach the late one.
        document = bisect_right(bounds, (early + 1) * chunk - 1) - 1
        start, stop = bounds[document], bounds[document + 1]
        if stop <= late * chunk:
            return None
        of_early = (max(start - early * chunk, 0), chunk)
        of_late = (0, min(stop - late * chunk, chunk))
        return (of_early, of_late) if q_chunk == early else (of_late, of_early)


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the two of 2 * `size` chunks that zigzag gives to a rank."""
    return rank, 2 * size - 1 - rank


def tokens_of(rank: int, size: int, seq_length: int) -> Tensor:
    """Return the tokens of the sequence that zigzag gives to a rank, int64 [s], in their order."""
    chunk = seq_length // (2 * size)
    return torch.cat([torch.arange(at * chunk, (at + 1) * chunk) for at in chunks_of(rank, size)])
