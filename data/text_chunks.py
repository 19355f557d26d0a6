# SPDX-License-Identifier: Apache-2.0
"""Cut a long text into pieces whose concatenated tokens are those of the whole text.

A tokenizer's time and memory grow with the piece it is given, and some grow much faster than the
text. So a text is cut before it is tokenized, at most `PIECE_CHARS` characters a piece (a character
is at most 4 bytes, so a piece is at most 1 MiB). Where to cut:

1. before a line break that follows a letter or digit, else before a space between two letters or
   digits: there the pre-tokenizers of the GPT-2, Llama 3, Qwen and o200k families split anyway,
   and nothing on one side of the cut changes how the other side is split;
2. only where a trial agrees: `WINDOW` characters on either side give the same tokens together as
   apart. This refuses the places of rule 1 under a tokenizer that works in another way;
3. at the last such place in the second half of the piece, among `TRIALS` candidates of each kind;
4. if there is none (a line of a million characters without a space, or a tokenizer that marks the
   start of every text), at the full length of the piece: a hard cut. The text is still whole;
   the tokens that touch the cut may differ from those of the uncut text.
"""

from collections.abc import Callable, Iterator

PIECE_CHARS = 2**18
WINDOW = 128
TRIALS = 32

SameApart = Callable[[str, str], bool]
"""Whether two adjacent texts give the same tokens together as apart."""


def pieces(text: str, same_apart: SameApart, limit: int = PIECE_CHARS) -> Iterator[str]:
    """Yield the text in order, in pieces of at most `limit` characters."""
    start = 0
    while len(text) - start > limit:
        cut = _last_cut(text, start + limit // 2, start + limit, same_apart)
        yield text[start:cut]
        start = cut
    yield text[start:]


def _last_cut(text: str, low: int, high: int, same_apart: SameApart) -> int:
    """Return the last proven place in (low, high], or `high` if there is none."""
    for mark in ("\n", " "):
        for cut in _candidates(text, mark, low, high):
            if same_apart(text[max(cut - WINDOW, 0) : cut], text[cut : cut + WINDOW]):
                return cut
    return high


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
