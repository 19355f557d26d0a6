# SPDX-License-Identifier: Apache-2.0
"""Put hidden lines into filler, queries behind it, and give the document its length in tokens."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.long_range.filler import Stream, line_end
from data.long_range.spec import LongRangeError

Count = Callable[[str], int]
"""Tokens of a text, without the one that ends a document."""

RATE_SAMPLE = 2**14
"""Characters, at most, from which the characters of a token are estimated."""
TRIES = 18


@dataclass(frozen=True, slots=True)
class Query:
    """The last lines of a document: `prompt`, then `answer`, then `end`."""

    prompt: str
    answer: str
    evidence: tuple[str, ...]
    """The lines from which the answer follows, in the order of the text."""
    end: str = "\n"

    @property
    def text(self) -> str:
        """Return the lines as they are written."""
        return self.prompt + self.answer + self.end


@dataclass(frozen=True, slots=True)
class Answer:
    """Where an answer is written and where its evidence is, as offsets in characters."""

    text: str
    at: int
    evidence: tuple[tuple[int, str], ...]
    """Offset and text of each line that the answer follows from."""

    @property
    def distance(self) -> int:
        """Return the characters between the farthest evidence and the answer."""
        return self.at - min(at for at, _ in self.evidence)


@dataclass(frozen=True, slots=True)
class LongDocument:
    """A document, and what it asks for."""

    text: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Lines to hide in filler, in the order of the text, and what is asked for behind it."""

    lines: tuple[str, ...]
    queries: tuple[Query, ...]


def tolerance(length: int) -> int:
    """Return by how many tokens a document may be shorter than its length."""
    return 16 + length // 64


def characters_per_token(stream: Stream, length: int, count: Count) -> float:
    """Return an estimate for this many tokens, from the beginning of a text."""
    sample = stream.take(min(RATE_SAMPLE, 4 * length))
    return len(sample) / max(count(sample), 1)


Build = Callable[[int, bool], str]
"""Returns a document with at most this many characters of filler, which end behind a whole word or,
if the second argument is true, exactly there."""


def fitted(build: Build, *, length: int, rate: float, count: Count, what: str) -> tuple[int, str]:
    """Return the characters of filler with which a document has its length, and the document.

    The document has at most `length - 1` tokens (one more ends it) and at least
    `length - tolerance(length)`.

    Args:
        rate: estimated characters of a token of the filler.
        what: the source's name, for a message.

    Raises:
        LongRangeError: if the document is too long without any filler, or if the number of tokens
            does not follow the number of characters.
    """
    limit, least = length - 1, length - tolerance(length)
    aim = (limit + least) / 2
    bare = count(build(0, True))
    if bare > limit:
        raise LongRangeError(
            f"{what}: a document of {length:,} tokens is too short, since the lines to hide and to"
            f" ask for take {bare + 1:,}; give a greater length, or fewer of them"
        )
    for exactly in (False, True):  # a word of another script can have more tokens than allowed
        low, tokens_of_low = 0, bare
        high, tokens_of_high = 0, 0  # none yet
        characters = max(1, round((aim - bare) * rate))
        for tried in range(TRIES):
            text = build(characters, exactly)
            tokens = count(text)
            if least <= tokens <= limit:
                return characters, text
            if tokens > limit:
                high, tokens_of_high = characters, tokens
            else:
                low, tokens_of_low = characters, tokens
            if not high:
                characters += max(1, round((aim - tokens) * rate))
            elif tried % 3 == 2:  # where interpolation only creeps towards the aim
                characters = (low + high) // 2
            else:
                share = (aim - tokens_of_low) / (tokens_of_high - tokens_of_low)
                characters = low + round(share * (high - low))
    raise LongRangeError(
        f"{what}: no amount of filler gives a document of {least:,} to {limit:,} tokens; choose"
        " another filler"
    )


def hidden_document(
    draw: random.Random,
    hidden: Hidden,
    stream: Stream,
    *,
    depth: tuple[float, float],
    length: int,
    count: Count,
    what: str,
) -> LongDocument:
    """Return the document of hidden lines, each at a drawn depth of the filler."""
    low, high = depth
    depths = sorted(low + (high - low) * draw.random() for _ in hidden.lines)
    closing = "\n" + "".join(query.text for query in hidden.queries)

    def build(characters: int, exactly: bool) -> str:
        filler = stream.take(characters, exactly)
        return "".join(_with_lines(filler, hidden.lines, depths)) + closing

    rate = characters_per_token(stream, length, count)
    _, text = fitted(build, length=length, rate=rate, count=count, what=what)
    return LongDocument(text, located(text, hidden.queries))


def _with_lines(filler: str, lines: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Return the filler in pieces with the lines between, each of them a line of its own."""
    parts, start = [], 0
    for line, depth in zip(lines, depths, strict=True):
        cut = max(start, line_end(filler, round(depth * len(filler))))
        piece = filler[start:cut]
        parts += [piece, "" if not piece or piece.endswith("\n") else "\n", line, "\n"]
        start = cut
    return [*parts, filler[start:]]


def located(text: str, queries: Sequence[Query]) -> tuple[Answer, ...]:
    """Return the offsets of answers, which are the last lines of a text, and of their evidence."""
    start = len(text) - sum(len(query.text) for query in queries)
    body = text[:start]
    answers = []
    for query in queries:
        at, evidence = 0, []
        for line in query.evidence:
            at = body.index(line, at)
            evidence.append((at, line))
            at += len(line)
        answers.append(Answer(query.answer, start + len(query.prompt), tuple(evidence)))
        start += len(query.text)
    return tuple(answers)
