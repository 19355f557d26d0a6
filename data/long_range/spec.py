# SPDX-License-Identifier: Apache-2.0
"""Parse the name of a synthetic source: `synthetic:KIND[,name=value...]`.

    retrieval      keys with numbers, hidden in filler; at the end some keys are asked for
    variables      chains of assignments (variable tracking, as in RULER, arXiv 2404.06654); at the
                   end the value of a chain and all its variables are asked for
    copy           a passage that is repeated word for word after the filler

All kinds take these values:

    length=64K           tokens of a document with the token that ends it; 1K-64K draws a length
                         between the two for each document, so that each doubling is as frequent
    documents=1000       number of documents
    seed=0
    filler=PATH          any other source of documents; without it, made-up English sentences

And some kinds take these:

    keys=4               retrieval: keys that are hidden
    chains=4, hops=4     variables: chains that are hidden, and assignments of a chain after its
                         first one
    queries=1            retrieval, variables: how many of the above are asked for
    form=prose           retrieval, variables: English sentences, or lines of Python with form=code
    passage=256          copy: tokens of the passage, approximately
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

PREFIX = "synthetic:"
COMMON = ("length", "documents", "seed", "filler")
OWN: dict[str, tuple[str, ...]] = {
    "retrieval": ("keys", "queries", "form"),
    "variables": ("chains", "hops", "queries", "form"),
    "copy": ("passage",),
}
"""The values that a kind takes besides COMMON."""
FORMS = ("prose", "code")
LARGEST: dict[str, int] = {
    "documents": 10**9,
    "seed": 2**63 - 1,
    "keys": 10_000,
    "chains": 1_000,
    "hops": 1_000,
    "queries": 10_000,
    "passage": 2**20,
}
SHORTEST_LENGTH, LONGEST_LENGTH = 64, 2**24
UNITS = {"": 1, "K": 2**10, "M": 2**20}


class LongRangeError(ValueError):
    """A synthetic source that cannot be made; the message says why in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The kind of a synthetic source and its values."""

    kind: str
    length: tuple[int, int] = (64 * 2**10,) * 2
    """Tokens of the shortest and of the longest document, the one that ends it included."""
    documents: int = 1000
    seed: int = 0
    filler: str = ""
    """A source of documents; empty: made-up sentences."""
    keys: int = 4
    chains: int = 4
    hops: int = 4
    queries: int = 1
    form: Literal["prose", "code"] = "prose"
    passage: int = 256

    @classmethod
    def parse(cls, source: str) -> "Spec":
        """Return the spec of a source's name; raise LongRangeError for one that is not valid."""
        kind, *words = re.split(r",(?=\s*[a-z_]+\s*=)", source.removeprefix(PREFIX))
        if kind not in OWN:
            raise LongRangeError(f"{kind!r} is not a kind of {PREFIX}KIND; choose {_or(OWN)}")
        given: dict[str, object] = {}
        known = (*COMMON, *OWN[kind])
        for word in words:
            name, _, value = (part.strip() for part in word.partition("="))
            if name not in known:
                raise LongRangeError(
                    f"{source}: {kind} has no value named {name!r}; it takes {_or(known)}"
                )
            if name in given:
                raise LongRangeError(f"{source}: {name} is given twice; give it once")
            given[name] = _value(source, name, value)
        spec = cls(kind=kind, **given)  # type: ignore[arg-type]
        asked_of = OWN[kind][0]
        if kind != "copy" and spec.queries > getattr(spec, asked_of):
            raise LongRangeError(
                f"{source}: queries={spec.queries} asks for more than "
                f"{asked_of}={getattr(spec, asked_of)}; give at most as many queries as {asked_of}"
            )
        if kind == "copy" and spec.passage > spec.length[0] // 3:
            raise LongRangeError(
                f"{source}: a passage of {spec.passage:,} tokens does not fit twice into a document"
                f" of {spec.length[0]:,} with text between; give at most"
                f" passage={spec.length[0] // 3}"
            )
        return spec

    def __str__(self) -> str:
        """Return the name of the source with every value that its kind takes."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "length":
                value = f"{value[0]}-{value[1]}" if value[0] != value[1] else value[0]
            if field.name in (*COMMON, *OWN[self.kind]) and value != "":
                words.append(f"{field.name}={value}")
        return f"{PREFIX}{self.kind},{','.join(words)}"


def _or(names: Iterable[str]) -> str:
    words = list(names)
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
