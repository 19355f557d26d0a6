# SPDX-License-Identifier: Apache-2.0
"""The documents of a synthetic source, each made from its number.

    retrieval      The code of Bamiro is 48213.               BAMIRO = 48213
                   What is the code of Bamiro? It is 48213.   assert BAMIRO == 48213

The first line of each pair is hidden in filler, the second one ends the document. Keys are made of
syllables, and no key or number occurs twice in a document. A document gets its length in tokens by
the amount of its filler.
"""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from data.long_range.filler import Filler, Stream, line_end
from data.long_range.spec import LongRangeError, Spec
from data.readers import Document

Count = Callable[[str], int]
"""Tokens of a text, without the one that ends a document."""
ReadTexts = Callable[[str], Iterable[str]]
"""Returns the documents of a source of text."""

FILLER_BYTES = 2**26
"""Text of the user's filler that is used: its first documents up to this many bytes."""
RATE_SAMPLE = 2**14
"""Characters, at most, from which the characters of a token are estimated."""
TRIES = 18
DIGITS = 5
"""Of a number that is asked for."""
SYLLABLES = [first + then for first in "bdfgklmnprstvz" for then in "aeiou"]


class Hidden(NamedTuple):
    """Lines to hide in filler, in the order of the text, and the lines that end the document."""

    lines: list[str]
    closing: str


def long_document(spec: Spec, number: int, count: Count, filler: Filler) -> str:
    """Return a document of a synthetic source.

    It depends on the arguments alone: on nothing that was made before.

    Args:
        count: tokens of a text by the tokenizer in use.
        filler: made from the source that `spec` names.
    """
    if not 0 <= number < spec.documents:
        raise IndexError(f"{spec} has no document {number}; it has {spec.documents}")
    draw = random.Random(f"{spec.seed} {spec.kind} {number}")
    shortest, longest = spec.length
    doublings = math.log2(longest / shortest) * draw.random()
    length = min(longest, round(shortest * 2**doublings))
    if spec.kind == "copy":
        return _copied_passage(spec, draw, filler, length, count)
    hidden = (_retrieval if spec.kind == "retrieval" else _variables)(spec, draw)
    stream = filler.stream(draw)
    depths = sorted(draw.random() for _ in hidden.lines)

    def build(characters: int, exactly: bool) -> str:
        filler = stream.take(characters, exactly)
        return f"{_with_lines(filler, hidden.lines, depths)}\n{hidden.closing}"

    return fitted(build, length=length, filler=stream, count=count, what=str(spec))


def distinct_names(draw: random.Random) -> Iterator[str]:
    """Yield names of two to four syllables, in lower case, each once."""
    seen: set[str] = set()
    while True:
        # Longer ones as they run out: 4,900 names have two syllables.
        name = "".join(draw.choices(SYLLABLES, k=draw.randint(2, 4) + len(seen) // 100_000))
        if name not in seen:
            seen.add(name)
            yield name


def _distinct_numbers(draw: random.Random) -> Iterator[str]:
    seen: set[int] = set()
    while True:
        number = draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)
        if number not in seen:
            seen.add(number)
            yield str(number)


def _retrieval(spec: Spec, draw: random.Random) -> Hidden:
    names, numbers = distinct_names(draw), _distinct_numbers(draw)
    lines, queries = [], []
    for name, number in [(next(names), next(numbers)) for _ in range(spec.keys)]:
        if spec.form == "code":
            lines.append(f"{name.upper()} = {number}")
            queries.append(f"assert {name.upper()} == {number}\n")
        else:
            lines.append(f"The code of {name.capitalize()} is {number}.")
            queries.append(f"What is the code of {name.capitalize()}? It is {number}.\n")
    return Hidden(lines, "".join(draw.sample(queries, spec.queries)))


def _variables(spec: Spec, draw: random.Random) -> Hidden:
    names, numbers = distinct_names(draw), _distinct_numbers(draw)
    chains = [[next(names) for _ in range(spec.hops + 1)] for _ in range(spec.chains)]
    values = [next(numbers) for _ in chains]
    turns = [number for number, chain in enumerate(chains) for _ in chain]
    draw.shuffle(turns)
    left = [
        iter(
            [_assignment(spec, new, old) for old, new in zip([value, *chain], chain, strict=False)]
        )
        for chain, value in zip(chains, values, strict=True)
    ]
    lines = [next(left[number]) for number in turns]
    queries = []
    for number in draw.sample(range(spec.chains), spec.queries):
        chain, value = chains[number], values[number]
        if spec.form == "code":
            queries.append(f"assert {chain[-1]} == {value}\n")
        else:
            names_of = ", ".join(name.capitalize() for name in chain)
            queries.append(f"Which variables have the value {value}? They are {names_of}.\n")
    return Hidden(lines, "".join(queries))


def _assignment(spec: Spec, new: str, old: str) -> str:
    if spec.form == "code":
        return f"{new} = {old}"
    value = old if old.isdigit() else f"the value of {old.capitalize()}"
    return f"The variable {new.capitalize()} is {value}."


def _copied_passage(
    spec: Spec, draw: random.Random, filler: Filler, length: int, count: Count
) -> str:
    """Return a passage, filler, and the passage again."""
    passages, between = filler.stream(draw), filler.stream(random.Random(draw.random()))
    rate = _characters_per_token(passages, spec.passage, count)
    passage = passages.take(round(spec.passage * rate)).strip()
    number = draw.randrange(1000, 10_000)
    first = f"Passage {number}:\n{passage}\nEnd of passage {number}.\n\n"
    last = f"\n\nPassage {number} again:\n{passage}\n"
    return fitted(
        lambda characters, exactly: first + between.take(characters, exactly) + last,
        length=length, filler=between, count=count, what=str(spec),
    )  # fmt: skip


def _with_lines(filler: str, lines: Sequence[str], depths: Sequence[float]) -> str:
    """Return the filler with the lines at depths of it, each of them a line of its own."""
    parts, start = [], 0
    for line, depth in zip(lines, depths, strict=True):
        cut = max(start, line_end(filler, round(depth * len(filler))))
        piece = filler[start:cut]
        parts += [piece, "" if not piece or piece.endswith("\n") else "\n", line, "\n"]
        start = cut
    return "".join([*parts, filler[start:]])


Build = Callable[[int, bool], str]
"""Returns a text with at most this many characters of filler, which end behind a whole word or, if
the second argument is true, exactly there."""


def tolerance(length: int) -> int:
    """Return by how many tokens a document may be shorter than its length."""
    return 16 + length // 64


def _characters_per_token(stream: Stream, length: int, count: Count) -> float:
    """Return an estimate for this many tokens, from the beginning of a text."""
    sample = stream.take(min(RATE_SAMPLE, 4 * length))
    return len(sample) / max(count(sample), 1)


def fitted(build: Build, *, length: int, filler: Stream, count: Count, what: str) -> str:
    """Return the text that has at most `length - 1` tokens (one more ends it).

    It has at least `length - tolerance(length)`. `what` is the source's name, for a message.

    Raises:
        LongRangeError: if the text is too long without any filler, or if the number of tokens does
            not follow the number of characters.
    """
    limit, least = length - 1, length - tolerance(length)
    aim = (limit + least) / 2
    rate = _characters_per_token(filler, length, count)
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
                return text
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


def filler_of(spec: Spec, read: ReadTexts) -> Filler:
    """Return the filler that a spec names; `read` returns the texts of a source."""
    if not spec.filler:
        return Filler()
    texts, size = [], 0
    for text in read(spec.filler):
        texts.append(text)
        size += len(text.encode())
        if size >= FILLER_BYTES:
            break
    if not any(not text.isspace() for text in texts):
        raise LongRangeError(f"{spec}: the filler {spec.filler} has no text; choose another source")
    return Filler(texts)


def without_tokenizer(origin: str) -> LongRangeError:
    """Return the error of a synthetic source that is used without a tokenizer."""
    return LongRangeError(
        f"{origin} has its length in tokens, so that a tokenizer has to be known; give"
        " --tokenizer, for example the folder `tokenizer` of another store"
    )


class SyntheticSource:
    """The documents of a source that is written `synthetic:KIND[,name=value...]`, by number."""

    kind: ClassVar = "synthetic"

    def __init__(self, source: str, count: Count | None, read: ReadTexts) -> None:
        """Parse the source's name and read its filler.

        Args:
            count: tokens of a text; without it only `origin` and `len` can be used.
            read: returns the texts of another source, which the filler may be.
        """
        self.spec = Spec.parse(source)
        self._count = count
        self._filler = filler_of(self.spec, read)

    @property
    def origin(self) -> str:
        """Return the source's name with the default values written out."""
        return str(self.spec)

    @property
    def state(self) -> str:
        """Return a hash of the filler's texts; empty for made-up sentences."""
        if not self._filler.texts:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for text in self._filler.texts:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.spec.documents

    def document(self, number: int, skipped: Counter[str]) -> Document:
        """Return a document; `skipped` receives nothing, since none is left out."""
        del skipped
        if self._count is None:
            raise without_tokenizer(self.origin)
        text = long_document(self.spec, number, self._count, self._filler)
        return Document(text, f"{self.origin} document {number}")

    def size(self, number: int) -> int:
        """Return the estimated bytes of a document, to divide the work by."""
        del number
        return 4 * (self.spec.length[0] + self.spec.length[1]) // 2
