# SPDX-License-Identifier: Apache-2.0
"""Check the documents of foreign token files, and choose which of them a store lists.

In order, so that what is cheap is refused first: the index and its sizes; documents without tokens;
then, by reading every token, ids outside of the vocabulary and documents that do not end with the
end-of-document token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.adoption.pairs import AdoptionError, Pair
from data.progress import progress
from data.store import TokenizerFacts
from data.token_files.document_scan import scan, shares
from data.token_files.megatron_index import MegatronIndex, read_index
from data.token_files.tokens import TokenType

WithoutEod = Literal["refuse", "keep", "leave-out"]
"""What is done about documents that do not end with the end-of-document token."""


LOOKED_AT = 10_000
"""Documents whose last token is looked at where it is not the tokenizer's."""
MOSTLY = 0.9
"""Share of them with the same last token that makes it the token that ends a document."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pair, its index, and the numbers of its documents that have tokens."""

    pair: Pair
    index: MegatronIndex
    documents: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of these documents."""
        return self.index.lengths[self.documents]

    @property
    def pointers(self) -> NDArray[np.int64]:
        """The bytes at which these documents start."""
        return self.index.pointers[self.documents]


@dataclass(frozen=True, slots=True)
class Checked:
    """Documents whose tokens were read, of a pair or of a source, that a store may list."""

    source: str
    dtype: TokenType
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    """The byte at which each starts, through all token files of a source."""
    hashes: NDArray[np.uint64]
    left_out: int
    """Documents without the end-of-document token that were left out."""
    unended: int
    """Documents without the end-of-document token that are listed."""
    begun: int = 0
    """Listed documents that begin with what the tokenizer puts first."""
    largest: int = 0
    """The largest token id."""

    @classmethod
    def joined(cls, pairs: "Sequence[Checked]", sizes: Sequence[int]) -> "Checked":
        """Return the documents of the pairs of a source, whose token files have these bytes."""
        if len(pairs) == 1:
            return pairs[0]
        starts = accumulate(sizes[:-1], initial=0)
        return cls(
            pairs[0].source,
            pairs[0].dtype,
            np.concatenate([pair.lengths for pair in pairs]),
            np.concatenate(
                [pair.pointers + start for pair, start in zip(pairs, starts, strict=True)]
            ),
            np.concatenate([pair.hashes for pair in pairs]),
            left_out=sum(pair.left_out for pair in pairs),
            unended=sum(pair.unended for pair in pairs),
            begun=sum(pair.begun for pair in pairs),
            largest=max(pair.largest for pair in pairs),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """How many documents of each source are held out: a share, or a number at most."""

    fraction: float | None = None
    """Share of the documents, each by the hash of its token ids."""
    documents: int | None = None
    """Number of documents, longer ones more probably."""

    def __post_init__(self) -> None:
        """Refuse a share or a number that leaves one of the splits empty."""
        if self.fraction is not None and self.documents is not None:
            raise AdoptionError(
                "--heldout-fraction and --heldout-documents exclude each other; leave one out"
            )
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise AdoptionError(
                f"the held-out fraction is {self.fraction}, not between 0 and 1; give one as 0.01"
            )
        if self.documents is not None and self.documents < 1:
            raise AdoptionError(
                f"--heldout-documents is {self.documents}; at least 1 of each source is held out"
            )


MOST_HELD_OUT = 1_000
LARGEST_SHARE = 0.1
"""Without a choice, this many documents of a source are held out, and this share of its tokens."""


def opened(pair: Pair, *, leave_out_empty: bool) -> Opened:
    """Check the index of a pair; raise ValueError for a damaged one, or for empty documents."""
    index = read_index(pair.idx, fills_bin=True)
    empty = index.lengths == 0
    if empty.any() and not leave_out_empty:
        raise AdoptionError(
            f"{pair.idx} has {int(empty.sum()):,} empty documents, the first is number "
            f"{int(np.argmax(empty)):,}; add --leave-out-empty to leave them out"
        )
    return Opened(pair, index, np.flatnonzero(~empty))


def require_one_type(pairs: Sequence[Pair], types: Sequence[TokenType]) -> None:
    """Raise AdoptionError for a pair of a source whose tokens have another type than the first."""
    for pair, dtype in zip(pairs, types, strict=True):
        if dtype != types[0]:
            raise AdoptionError(
                f"{pair.bin} has tokens of type {dtype.name} and {pairs[0].bin} of "
                f"{types[0].name}; the pairs of the source {pair.name} have one type: adopt this "
                f"pair as another source, NAME={pair.prefix}"
            )


def checked(
    pair: Opened,
    tokenizer: TokenizerFacts,
    without_eod: WithoutEod,
    word_of: Callable[[int], str | None],
) -> Checked:
    """Read every token of a pair; raise AdoptionError for ids or ends that do not fit.

    `word_of` is what the tokenizer calls an id.
    """
    lengths, pointers = pair.lengths, pair.pointers
    if not len(lengths):  # the others of its source may have documents
        hashes = np.empty(0, np.uint64)
        return Checked(pair.pair.name, pair.index.dtype, lengths, pointers, hashes, 0, 0)
    width = pair.index.dtype.itemsize
    with progress(f"checking {pair.pair.bin.name}", pair.index.tokens * width) as advance:
        facts = scan(
            pair.index.mapped(),
            pointers // width,
            lengths,
            tokenizer.eod_id,
            lambda documents, tokens: advance(tokens * width, documents, tokens),
            (tokenizer.first_ids or (-1,))[0],
        )
    path = pair.pair.bin
    if facts.largest >= tokenizer.vocab_size or facts.smallest < 0:
        wrong = facts.largest if facts.largest >= tokenizer.vocab_size else facts.smallest
        raise AdoptionError(
            f"{path} has the token id {wrong:,}; {tokenizer.name} has ids from 0 to "
            f"{tokenizer.vocab_size - 1:,}, so another tokenizer made it; name that one"
        )
    unended = int(len(facts.ended) - facts.ended.sum())
    if unended and without_eod == "refuse":
        share = 1 - unended / len(facts.ended)
        first = int(pair.documents[int(np.argmin(facts.ended))])
        raise AdoptionError(
            f"{share:.1%} of the documents of {path} end with the token {tokenizer.eod_id} that "
            f"ends a document for {tokenizer.name}; {unended:,} do not, the first is number "
            f"{first:,}: {_what_ends(pair, tokenizer.eod_id, word_of)}, or use --without-eod "
            "leave-out or --without-eod keep"
        )
    listed = facts.ended if without_eod == "leave-out" else np.ones(len(lengths), dtype=bool)
    return Checked(
        pair.pair.name,
        pair.index.dtype,
        lengths[listed],
        pointers[listed],
        facts.hashes[listed],
        left_out=int(len(lengths) - listed.sum()),
        unended=unended if without_eod == "keep" else 0,
        begun=_begun(pair, pointers[listed & facts.begun] // width, tokenizer.first_ids or ()),
        largest=facts.largest,
    )


def _what_ends(pair: Opened, eod_id: int, word_of: Callable[[int], str | None]) -> str:
    """Return what to do about documents that end with another token than the tokenizer's."""
    width = pair.index.dtype.itemsize
    ends = (pair.pointers // width + pair.lengths - 1)[:LOOKED_AT]
    stored = pair.index.mapped()
    last = [int(stored[end : end + 1][0]) for end in ends]
    tokens, counts = np.unique(last, return_counts=True)
    token, share = int(tokens[counts.argmax()]), counts.max() / len(ends)
    if token == eod_id or len(ends) == 1 or share < MOSTLY:
        return "write them again with the token at each end (preprocess_data --append-eod)"
    return (
        f"{share:.0%} of {'them' if len(ends) < LOOKED_AT else 'the first'} end with the token "
        f"{token} ({word_of(token)!r}); name a tokenizer whose eos_token is that, such as a copy "
        "of this one with another eos_token in its tokenizer_config.json"
    )


def _begun(pair: Opened, starts: NDArray[np.int64], first: Sequence[int]) -> int:
    """Return how many of the documents that begin with the first of some tokens have all of them.

    Tokenizers that put several first are few, so these documents are read one by one.
    """
    if len(first) < 2:
        return len(starts)
    tokens = pair.index.mapped()
    return sum(tokens[start : start + len(first)].tolist() == list(first) for start in starts)


def held_out(documents: Checked, choice: HeldOut, seed: int) -> NDArray[np.bool_]:
    """Return which documents are held out: by the hash of their token ids, so copies together.

    For a share, those whose hash is a number below it. For a number n, those with the n smallest
    of -ln(1 - u) / length, u the hash as a number in [0, 1): a draw without replacement with a
    probability in proportion to the length, so that long documents, which an evaluation needs, are
    among few. Without a choice n is `MOST_HELD_OUT` texts, and less where these have more than
    `LARGEST_SHARE` of the tokens; a text that has more by itself is not drawn.
    """
    place = shares(documents.hashes, seed)
    lengths = documents.lengths.astype(np.int64)
    if choice.fraction is not None:
        chosen = place < choice.fraction
    else:
        order = -np.log1p(-place) / lengths
        if choice.documents is None:
            chosen = _few_tokens(documents, order)
        else:
            most = min(choice.documents, len(lengths))
            chosen = order <= np.partition(order, most - 1)[most - 1]
    if not chosen.any() or chosen.all():
        raise AdoptionError(
            f"the {'train' if chosen.all() else 'heldout'} split of {documents.source} is "
            f"empty: it has {len(lengths):,} documents; choose another --heldout-fraction or "
            "--heldout-documents"
        )
    return chosen


def _few_tokens(documents: Checked, order: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the first `MOST_HELD_OUT` texts in an order that have `LARGEST_SHARE` of the tokens.

    Copies are counted with their text. Raises AdoptionError if each text has a larger share.
    """
    _, first, text = np.unique(documents.hashes, return_index=True, return_inverse=True)
    tokens = np.bincount(text, weights=documents.lengths)
    most = LARGEST_SHARE * tokens.sum()
    drawn = np.flatnonzero(tokens <= most)
    if not len(drawn):
        raise AdoptionError(
            f"each document of {documents.source} has more than {LARGEST_SHARE:.0%} of its "
            f"tokens, which is the most that is held out without a choice; the shortest has "
            f"{tokens.min() / tokens.sum():.0%}: choose --heldout-documents 1, or adopt more "
            "documents"
        )
    drawn = drawn[np.argsort(order[first[drawn]], kind="stable")][:MOST_HELD_OUT]
    chosen = np.zeros(len(first), dtype=bool)
    chosen[drawn[np.cumsum(tokens[drawn]) <= most]] = True
    return chosen[text]
