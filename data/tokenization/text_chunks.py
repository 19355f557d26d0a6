# SPDX-License-Identifier: Apache-2.0
"""Cut a long text into pieces whose concatenated tokens are those of the whole text.

A tokenizer's time and memory grow with the piece it is given, and some grow much faster than the
text. So a text is cut before it is tokenized, at most `PIECE_CHARS` characters a piece (a character
is at most 4 bytes, so a piece is at most 1 MiB). Where to cut:

1. before a line break that follows a letter or digit, else before a space between two letters or
   digits, else (in text without spaces, such as Chinese) before a punctuation mark or symbol that
   follows a letter: there the pre-tokenizers of the GPT-2, Llama 3, Qwen and o200k families split
   anyway, and nothing on one side of the cut changes how the other side is split;
2. only where a trial agrees: `WINDOW` characters on either side give the same tokens together as
   apart. This refuses the places of rule 1 under a tokenizer that works in another way;
3. at the last such place in the second half of the piece, among `TRIALS` candidates of each kind,
   those before punctuation in its last `SEARCHED` characters;
4. if there is none (a line of a million characters without a space, or a tokenizer that marks the
   start of every text), at the full length of the piece: a hard cut. The text is still whole;
   the tokens that touch the cut may differ from those of the uncut text.
"""

from collections.abc import Callable, Iterable, Iterator

PIECE_CHARS = 2**18
WINDOW = 128
TRIALS = 32
SEARCHED = 2**14

SameApart = Callable[[str, str], bool]
"""Whether two adjacent texts give the same tokens together as apart."""


def pieces(text: str, same_apart: SameApart, limit: int = PIECE_CHARS) -> Iterator[str]:
    """Yield the text in order, in pieces of at most `limit` characters."""
    return pieces_of((text,), same_apart, limit)


def pieces_of(
    chunks: Iterable[str], same_apart: SameApart, limit: int = PIECE_CHARS
) -> Iterator[str]:
    """Yield the pieces of a text that arrives in chunks; they do not depend on the chunks.

    Held at a time are a piece, a chunk, and what a trial compares around a cut.
    """
    text, start = "", 0
    for chunk in chunks:
        kept = max(start - WINDOW, 0)
        text, start = text[kept:] + chunk, start - kept
        while len(text) - start > limit + WINDOW:
            cut = _last_cut(text, start + limit // 2, start + limit, same_apart)
            yield text[start:cut]
            start = cut
    while len(text) - start > limit:
        cut = _last_cut(text, start + limit // 2, start + limit, same_apart)
        yield text[start:cut]
        start = cut
    yield text[start:]


def _last_cut(text: str, low: int, high: int, same_apart: SameApart) -> int:
    """Return the last proven place in (low, high], or `high` if there is none."""
    for candidates in (
        _candidates(text, "\n", low, high),
        _candidates(text, " ", low, high),
        _before_punctuation(text, low, high),
    ):
        for cut in candidates:
            if same_apart(text[max(cut - WINDOW, 0) : cut], text[cut : cut + WINDOW]):
                return cut
    return high


def _before_punctuation(text: str, low: int, high: int) -> Iterator[int]:
    """Yield up to `TRIALS` places between a letter and a mark that is not white space."""
    found = 0
    for cut in range(high, max(low, high - SEARCHED), -1):
        follows = text[cut : cut + 1]
        if text[cut - 1].isalpha() and follows and not follows.isalnum() and not follows.isspace():
            yield cut
            found += 1
            if found == TRIALS:
                return


def _candidates(text: str, mark: str, low: int, high: int) -> Iterator[int]:
    """Yield up to `TRIALS` places before `mark`, from the last one backwards."""
    found = 0
    cut = text.rfind(mark, low + 1, high + 1)
    while cut > low and found < TRIALS:
        follower_fits = mark == "\n" or text[cut + 1 : cut + 2].isalnum()
        if text[cut - 1].isalnum() and follower_fits:
            found += 1
            yield cut
        cut = text.rfind(mark, low + 1, cut)
