# SPDX-License-Identifier: Apache-2.0
"""Parse the name of a synthetic source: `synthetic:KIND[,name=value...]`.

    retrieval      keys with numbers, hidden in filler; at the end some keys are asked for
    multi_needle   keys that have several numbers each; at the end all numbers of a key are asked
                   for, in the order in which they appear
    variables      chains of assignments (variable tracking, as in RULER, arXiv 2404.06654); at the
                   end the value of a chain and all its variables are asked for
    copy           a passage that is repeated word for word after the filler
    questions      several documents one after another; at the end a sentence of one of them is
                   quoted and the sentence that follows it is asked for

All kinds take these values:

    length=64K           tokens of a document with the token that ends it; 1K-64K draws a length
                         between the two for each document, so that each doubling is as frequent
    documents=1000       number of documents
    seed=0
    filler=PATH          any other source of documents; without it, made-up English sentences

And some kinds take these:

    keys=4               retrieval, multi_needle: keys that are hidden
    values=4             multi_needle: numbers of each key
    chains=4, hops=4     variables: chains that are hidden, and assignments of a chain after its
                         first one
    queries=1            all but copy: how many of the above are asked for
    digits=5             retrieval, multi_needle, variables: digits of a number
    depth=0-1            retrieval, multi_needle, variables: where in the filler the hidden lines
                         may be; 0.2-0.4 is between one fifth and two fifths of it
    form=prose           retrieval, multi_needle, variables: English sentences, or lines of Python
                         with form=code
    passage=256          copy: tokens of the passage, approximately
"""

import re
from dataclasses import dataclass, fields
from typing import Literal, get_args

PREFIX = "synthetic:"

Kind = Literal["retrieval", "multi_needle", "variables", "copy", "questions"]
Form = Literal["prose", "code"]
KINDS: tuple[str, ...] = get_args(Kind)
FORMS: tuple[str, ...] = get_args(Form)

COMMON = ("length", "documents", "seed", "filler")
HIDDEN = ("queries", "digits", "depth", "form")
OWN: dict[str, tuple[str, ...]] = {
    "retrieval": ("keys", *HIDDEN),
    "multi_needle": ("keys", "values", *HIDDEN),
    "variables": ("chains", "hops", *HIDDEN),
    "copy": ("passage",),
    "questions": ("queries",),
}
"""The values that a kind takes besides COMMON."""

LARGEST: dict[str, int] = {
    "documents": 10**9,
    "seed": 2**63 - 1,
    "keys": 10_000,
    "values": 1_000,
    "chains": 1_000,
    "hops": 1_000,
    "queries": 10_000,
    "digits": 18,
    "passage": 2**20,
}
SHORTEST_LENGTH, LONGEST_LENGTH = 64, 2**24
UNITS = {"": 1, "K": 2**10, "M": 2**20}
ASKED_OF = {"retrieval": "keys", "multi_needle": "keys", "variables": "chains"}
"""What the queries of a kind choose from."""


class LongRangeError(ValueError):
    """A synthetic source that cannot be made; the message says why in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The kind of a synthetic source and its values."""

    kind: Kind
    length: tuple[int, int]
    """Tokens of the shortest and of the longest document, the one that ends it included."""
    documents: int = 1000
    seed: int = 0
    filler: str = ""
    """A source of documents; empty: made-up sentences."""
    keys: int = 4
    values: int = 4
    chains: int = 4
    hops: int = 4
    queries: int = 1
    digits: int = 5
    depth: tuple[float, float] = (0.0, 1.0)
    form: Form = "prose"
    passage: int = 256

    @classmethod
    def parse(cls, source: str) -> "Spec":
        """Return the spec of a source's name; raise LongRangeError for one that is not valid."""
        kind, *words = re.split(r",(?=\s*[a-z_]+\s*=)", source.removeprefix(PREFIX))
        if kind not in KINDS:
            raise LongRangeError(f"{kind!r} is not a kind of {PREFIX}KIND; choose {_or(KINDS)}")
        given: dict[str, object] = {"length": (64 * 2**10,) * 2}
        seen = set()
        for word in words:
            name, _, value = (part.strip() for part in word.partition("="))
            known = (*COMMON, *OWN[kind])
            if name not in known:
                raise LongRangeError(
                    f"{source}: {kind} has no value named {name!r}; it takes {_or(known)}"
                )
            if name in seen:
                raise LongRangeError(f"{source}: {name} is given twice; give it once")
            seen.add(name)
            given[name] = _value(source, name, value)
        spec = cls(kind=kind, **given)  # type: ignore[arg-type]
        spec._require_possible(source)
        return spec

    def _require_possible(self, source: str) -> None:
        of = ASKED_OF.get(self.kind)
        if of is not None and self.queries > getattr(self, of):
            raise LongRangeError(
                f"{source}: queries={self.queries} asks for more than {of}={getattr(self, of)};"
                f" give at most as many queries as {of}"
            )
        if self.kind != "copy" and self.kind != "questions":
            hidden = getattr(self, ASKED_OF[self.kind])
            numbers = hidden * (self.values if self.kind == "multi_needle" else 1)
            if numbers > 9 * 10 ** (self.digits - 1) // 2:
                raise LongRangeError(
                    f"{source}: {numbers:,} different numbers are too many for"
                    f" digits={self.digits}; give more digits"
                )
        if self.kind == "copy" and self.passage > self.length[0] // 3:
            raise LongRangeError(
                f"{source}: a passage of {self.passage:,} tokens does not fit twice into a document"
                f" of {self.length[0]:,} with text between; give at most"
                f" passage={self.length[0] // 3}"
            )

    def __str__(self) -> str:
        """Return the name of the source with every value that its kind takes."""
        words = []
        for field in fields(self):
            if field.name not in (*COMMON, *OWN[self.kind]):
                continue
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                low, high = value
                value = low if low == high else f"{low}-{high}"
            if value != "":
                words.append(f"{field.name}={value}")
        return f"{PREFIX}{self.kind},{','.join(words)}"


def _or(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _value(source: str, name: str, value: str) -> object:
    if name == "filler":
        if not value or value.startswith(PREFIX):
            raise LongRangeError(
                f"{source}: filler={value!r} is not a source of text; name a folder or a file, or"
                " leave it out for made-up sentences"
            )
        return value
    if name == "form":
        if value not in FORMS:
            raise LongRangeError(f"{source}: form={value!r} is not known; choose {_or(FORMS)}")
        return value
    if name == "length":
        return _lengths(source, value)
    if name == "depth":
        return _depths(source, value)
    least = 0 if name in ("seed", "hops") else 1
    if not re.fullmatch(r"\d{1,19}", value) or not least <= int(value) <= LARGEST[name]:
        raise LongRangeError(
            f"{source}: {name}={value!r} is not a whole number from {least} to {LARGEST[name]:,}"
        )
    return int(value)


def _lengths(source: str, value: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})([KM]?)(?:-(\d{1,9})([KM]?))?", value.upper())
    if match is not None:
        low = int(match[1]) * UNITS[match[2]]
        high = low if match[3] is None else int(match[3]) * UNITS[match[4]]
        if SHORTEST_LENGTH <= low <= high <= LONGEST_LENGTH:
            return low, high
    raise LongRangeError(
        f"{source}: length={value!r} is not a number of tokens from {SHORTEST_LENGTH} to"
        f" {LONGEST_LENGTH // 2**20}M, such as 64K, or two of them, such as 1K-64K"
    )


def _depths(source: str, value: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d\.?\d*)(?:-(\d\.?\d*))?", value)
    if match is not None:
        low = float(match[1])
        high = low if match[2] is None else float(match[2])
        if 0 <= low <= high <= 1:
            return low, high
    raise LongRangeError(
        f"{source}: depth={value!r} is not a share of the text from 0 to 1, such as 0.5, or two of"
        " them, such as 0-0.5"
    )
