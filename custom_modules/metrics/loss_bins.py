# SPDX-License-Identifier: Apache-2.0
"""Mean training loss by position and by source, from the losses of tokens that a step has anyway.

    table[source, bin] += (loss * mask, mask)         one `index_add_` for each micro-batch

A position is that of the token in its sequence, or in its document if attention stays within
documents: what it can see. Bins are octaves, the last one from half the sequence up; positions of a
stage that skips some go beyond. Every rank adds what it computes. The sums of all ranks, divided,
are means over tokens under any parallelism: tensor parallel ranks compute the same losses, which
leaves a mean as it is, and pipeline stages without the loss add nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

OCTAVES = 7
"""Bins below half the sequence have half the width of the next one, down to the first."""


class LossBins:
    """Sums of losses and of tokens of one step, on this rank."""

    def __init__(self, seq_length: int, sources: Sequence[str], device: torch.device | int) -> None:
        """Take the length of a sequence and the names of the sources, by their numbers."""
        self.edges = edges(seq_length)
        self.sources = tuple(sources) or ("documents",)
        self._edges = torch.tensor(self.edges, device=device)
        shape = (len(self.sources) * (len(self.edges) + 1), 2)
        self._table = torch.zeros(shape, dtype=torch.float64, device=device)

    @property
    def width(self) -> int:
        """Numbers that `sums` returns."""
        return 2 * (len(self.edges) + 1 + len(self.sources))

    def clear(self) -> None:
        """Forget the step that has ended."""
        self._table.zero_()

    def add(self, losses: Tensor, mask: Tensor, positions: Tensor, sources: Tensor | None) -> None:
        """Count a micro-batch: losses, mask, positions [b, s], and the source [b] of each row."""
        index = torch.bucketize(positions, self._edges, right=True)
        if sources is not None:
            index = index + sources[:, None] * (len(self.edges) + 1)
        counted = mask.to(torch.float64)
        values = torch.stack([losses.detach().to(torch.float64) * counted, counted], -1)
        self._table.index_add_(0, index.flatten(), values.view(-1, 2))

    def sums(self) -> Tensor:
        """Return the sums [width] by position, then by source: those of losses, and tokens."""
        table = self._table.view(len(self.sources), -1, 2)
        return torch.cat([table.sum(0).flatten(), table.sum(1).flatten()])

    def means(self, sums: Tensor) -> tuple[dict[str, float | None], dict[str, float | None]]:
        """Return the mean loss by position and by source, of the sums [width] of all ranks.

        Bins without a token are left out; a loss that is not finite is None.
        """
        pairs = sums.view(-1, 2).tolist()
        starts = (0, *self.edges)
        names = [f"{low}-{high}" for low, high in zip(starts, self.edges, strict=False)]
        names.append(f"{starts[-1]}+")
        of_positions, of_sources = pairs[: len(names)], pairs[len(names) :]
        return _means(names, of_positions), _means(self.sources, of_sources)


def edges(seq_length: int) -> tuple[int, ...]:
    """Return where bins end, in tokens: halves of the sequence, of its half and so on."""
    halves = (seq_length >> shift for shift in range(OCTAVES, 0, -1))
    return tuple(sorted({edge for edge in halves if edge > 0}))


def _means(names: Sequence[str], pairs: Sequence[Sequence[float]]) -> dict[str, float | None]:
    return {
        name: loss / tokens if math.isfinite(loss) else None
        for name, (loss, tokens) in zip(names, pairs, strict=True)
        if tokens
    }
