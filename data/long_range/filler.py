# SPDX-License-Identifier: Apache-2.0
"""The text between hidden lines: made-up English sentences, or documents of the user's.

A stream gives, for any number of characters, the beginning of one text that does not change, so
that a document can be lengthened and shortened until it has the tokens that it should.
"""

import random
from collections.abc import Iterator, Sequence

# fmt: off
WHO = (
    "miller", "teacher", "sailor", "gardener", "clerk", "painter", "doctor", "farmer", "tailor",
    "guard", "student", "driver", "cook", "printer", "widow", "captain", "judge", "baker",
    "shepherd", "engineer", "merchant", "neighbour", "librarian", "carpenter", "nurse", "singer",
)
QUALITY = (
    "old", "young", "quiet", "tired", "cheerful", "careful", "stubborn", "patient", "tall", "busy",
    "green", "heavy", "small", "broken", "narrow", "wooden", "empty", "clean", "bright", "grey",
)
DID = (
    "carried", "painted", "sold", "found", "repaired", "opened", "measured", "borrowed", "cleaned",
    "described", "hid", "bought", "lost", "counted", "moved", "drew", "returned", "watched",
)
WHAT = (
    "door", "letter", "basket", "lamp", "boat", "map", "table", "coat", "clock", "bridge", "ladder",
    "box", "fence", "chair", "book", "wheel", "window", "rope", "bell", "kettle", "wall", "cart",
)
WHERE = (
    "behind the station", "near the river", "in the market", "at the mill", "on the hill",
    "under the bridge", "beside the church", "in the harbour", "at the end of the road",
    "in the garden", "across the field", "at the school", "in the kitchen", "by the lake",
)
WHEN = (
    "Before noon", "In the evening", "Last winter", "After the rain", "Every spring", "At dawn",
    "On a Sunday", "In the first week", "During the storm", "Long ago", "Two days later",
)
# fmt: on
PARAGRAPH = 6
"""Sentences of a made-up paragraph."""
MADE_UP_DOCUMENT = 24
"""Paragraphs of a made-up document."""


def sentence(draw: random.Random) -> str:
    """Return one made-up sentence."""
    pick = draw.choice
    quality = pick(QUALITY)
    article = "an" if quality[0] in "aeiou" else "a"
    text = f"{pick(QUALITY)} {pick(WHO)} {pick(DID)} {article} {quality} {pick(WHAT)} {pick(WHERE)}"
    return f"The {text}." if draw.random() < 0.5 else f"{pick(WHEN)} the {text}."


def made_up_paragraphs(draw: random.Random) -> Iterator[str]:
    """Yield made-up paragraphs without end."""
    while True:
        yield " ".join(sentence(draw) for _ in range(PARAGRAPH))


class Filler:
    """Texts to draw filler from; made-up ones if there are none."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        """Take the documents of the user's source."""
        self.texts = texts

    def documents(self, draw: random.Random) -> Iterator[str]:
        """Yield documents without end, from a drawn one on; the user's repeat after the last."""
        if not self.texts:
            paragraphs = made_up_paragraphs(draw)
            while True:
                yield "\n".join(next(paragraphs) for _ in range(MADE_UP_DOCUMENT))
        first = draw.randrange(len(self.texts))
        while True:
            yield from self.texts[first:]
            yield from self.texts[:first]

    def stream(self, draw: random.Random) -> "Stream":
        """Return the documents as one text."""
        return Stream(self.documents(draw))


class Stream:
    """One text without end, read from its beginning to any length."""

    def __init__(self, documents: Iterator[str]) -> None:
        """Take documents without end; each is followed by an empty line."""
        self._documents = documents
        self._text = ""

    def take(self, characters: int, exactly: bool = False) -> str:
        """Return at most this many characters, up to a whole word; exactly as many if asked to."""
        if len(self._text) < characters + 1:
            parts = [self._text]
            missing = characters + 1 - len(self._text)
            while missing > 0:
                parts.append(next(self._documents).strip("\n") + "\n\n")
                missing -= len(parts[-1])
            self._text = "".join(parts)
        return self._text[: characters if exactly else word_end(self._text, characters)]


LONGEST_WORD = 24
"""Characters to look back for the end of a word; text without any is cut anywhere."""
LONGEST_LINE = 400
"""Characters to look back for the end of a line."""


def word_end(text: str, at: int) -> int:
    """Return the last end of a word at or before a place; the place if there is none near it."""
    if at >= len(text) or at <= 0:
        return max(0, min(at, len(text)))
    for place in range(at, max(at - LONGEST_WORD, 0), -1):
        if text[place].isspace():
            return place
    return at


def line_end(text: str, at: int) -> int:
    """Return the place behind the nearest line break before a place, else an end of a sentence."""
    if at <= 0 or at >= len(text):
        return max(0, min(at, len(text)))
    for mark in ("\n", ". "):
        place = text.rfind(mark, max(at - LONGEST_LINE, 0), at)
        if place >= 0:
            return place + len(mark)
    return word_end(text, at)
