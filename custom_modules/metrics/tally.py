# SPDX-License-Identifier: Apache-2.0
"""Count what a rank receives in one optimizer step: tokens, samples, documents, waiting time."""

from torch import Tensor

IN_WINDOW = "sum_squared_lengths_in_window"
ROW_FACTS = ("documents", "sum_squared_lengths", "padding_tokens", IN_WINDOW)
"""Names of the facts of a whole row that a data set gives with a sample, as `row_facts` [3 or 4].

Documents and pieces of documents; the sum of the squared lengths that tokens attend within, without
padding: those of documents, or of the row if attention goes across; and tokens of padding. For a
model whose local layers have a window of W, the sum of 2 W l - W^2 in place of l^2 where l is over
W: of their pairs of tokens.
"""


class Tally:
    """Tokens and samples that this rank has received in one optimizer step."""

    def __init__(self) -> None:
        """Start empty."""
        self.clear()

    def clear(self) -> None:
        """Forget the step that has ended."""
        self.tokens = 0
        self.samples: list[int] = []
        self.waited = 0.0
        """Seconds that the step waited for its data; of the host until `StepLog` knows better."""
        self.row_facts: list[int] | None = None
        """Sums over the rows of the first of `ROW_FACTS`; None of data that says none."""

    def add(self, tokens: Tensor, sample_ids: Tensor, row_facts: Tensor | None = None) -> None:
        """Count one micro-batch: tokens [b, s] on this rank, sample ids [b], facts [b, 3 or 4]."""
        self.tokens += tokens.numel()
        self.samples += sample_ids.tolist()
        if row_facts is not None:
            sums = row_facts.sum(0).tolist()
            before = self.row_facts or [0] * len(sums)
            self.row_facts = [one + more for one, more in zip(before, sums, strict=True)]
