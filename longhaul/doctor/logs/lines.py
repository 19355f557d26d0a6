# SPDX-License-Identifier: Apache-2.0
"""The lines of a log that may tell of a fault, with those that continue them.

A log may have any size. Its lines repeat, but for their numbers: a line is reduced to lower case
without digits and white space, and what was concluded of it once holds for all that reduce to the
same. Hints are looked for in all new lines of a batch at once, which is much faster than line by
line. Only a line with a hint is parsed, and so is a pair of lines with a hint across their break: a
terminal breaks a sentence between two words or within one, below a rank's prefix or not.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import BinaryIO, NamedTuple

LONGEST = 2**13
"""Bytes after which a line is read as if it were broken there."""
AHEAD, BACK = 24, 3
"""Lines in which the rest of a sentence is looked for, and its beginning."""
BATCH, MOST_SHAPES = 4096, 50_000
"""Lines that are held at once, and conclusions."""
NARROWEST = 40
"""Columns of the narrowest line that a terminal has broken."""
EDGE = 24
"""Reduced bytes on each side of a break in which a hint may lie."""
_LOWER = bytes(range(256)).lower()
_DROPPED = b" \t\r\n|0123456789" + bytes(range(128, 256))
_NO_NAN = re.compile(rb"nan iterations: *0")
"""In each line of Megatron's log."""
_ADDRESS = re.compile(rb"0x[0-9a-f]+")
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_REDUCED_PREFIX = re.compile(
    rb"\A(?:\[[a-z_]*,?\](?:<[a-z]+>)?:?|\(\S{0,40}?pid=(?:,ip=\.+)?\)|\[?(?:--t?)?::[.,]?z?\]?|:"
    rb"|std(?:err|out)[fp]|[a-z.-]{1,20}/)+"
)
"""A prefix as below, reduced."""
_BOX = " \t\r\n|\u2500\u2502\u256d\u256e\u256f\u2570\u2503\u2501\u2554\u2551\u255a"
_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_PREFIX = re.compile(
    r"\s*(?:"
    r"\[(?:rank|default|local_rank)?(?P<torchrun>\d+)\]:?"
    r"|\[\d+,(?P<mpi>\d+)\](?:<\w+>)?:?|(?P<srun>\d+):(?=\s|$)"
    r"|[\w.-]+/(?P<torchx>\d+)(?=\s)|\([\w().-]+ pid=\d+(?:, ip=[\d.]+)?\)"
    rf"|\[?\d{{4}}-\d\d-\d\d[T ]{_TIME}(?:Z| ?[+-]\d\d:?\d\d)?\]?|\[{_TIME}\]|{_TIME}(?=\s)"
    rf"|[A-Z][a-z]{{2}} [ \d]\d {_TIME} [\w.-]+|\[ *\d+\.\d{{6}}\]|std(?:out|err) [FP](?=\s)"
    r"|[A-Za-z][\w.-]*\d[\w.-]*:(?=\s)"
    r")"
)
"""A prefix of torchrun, mpirun, srun, nemo-run, Ray, syslog, dmesg, a container or pdsh."""
_BEGINS = re.compile(
    r"\[[EWIF]\d|Traceback|File \"|(?:\w+\.)*[A-Z]\w+(?:Error|Exception): |srun:|slurmstepd:"
    r"|iteration |step \d"
)
"""How a line begins that continues none."""


class Line(NamedTuple):
    """A line without what was put in front of it."""

    number: int
    rank: int | None
    """The rank that wrote it, by what is in front of it."""
    lane: int | None
    """The number that the launcher puts first in each of its lines."""
    text: str
    width: int
    """Columns with what is in front of it."""


class Suspect(NamedTuple):
    """A line with a hint, or across whose end a hint lies."""

    kinds: frozenset[str]
    line: Line
    before: tuple[Line, ...]
    after: tuple[Line, ...]
    """Lines that may continue it, up to `AHEAD`."""


_Kinds = tuple[frozenset[str], frozenset[str]]


class Lines:
    """Reads a log once."""

    def __init__(
        self, hints: Iterable[tuple[str, str]], error_like: Iterable[str], shown: int
    ) -> None:
        """Take hints, each with its kind, the words of an error, and how many of its lines to keep.

        Both are in lower case, without white space and digits.
        """
        self._hints: dict[bytes, list[str]] = {}
        for hint, kind in (*hints, *((word, "") for word in error_like)):
            self._hints.setdefault(hint.encode(), []).append(kind)
        self._last: deque[tuple[int, bytes]] = deque(maxlen=shown)
        self._concluded: dict[bytes, _Kinds] = {}
        self.count = 0
        """Lines read."""
        self.binary = False
        """Whether a line has NUL bytes."""
        self.blank = True
        """Whether it has nothing but white space."""

    @property
    def error_like(self) -> list[Line]:
        """The last lines with a word of an error."""
        return [_clean(number, raw) for number, raw in self._last]

    def suspects(self, file: BinaryIO) -> Iterator[Suspect]:
        """Yield the suspects of a log in order."""
        pieces, held, kinds = self._pieces(file), list[tuple[int, bytes]](), list[_Kinds]()
        begin, edge = 0, b""
        while True:
            batch = list(islice(pieces, BATCH))
            held += batch
            keys = []
            for _, raw in batch:
                shape = _reduced(raw)
                keys.append(edge + b"\n" + shape)
                edge = shape[-EDGE:]
            kinds += self._concluded_of(keys)
            for at in range(begin, len(held) - AHEAD if batch else len(held)):
                own, across = kinds[at]
                if "" in own:
                    self._last.append(held[at])
                if across and at:
                    yield _suspect(across, held, at - 1)
                if own - {""}:
                    yield _suspect(own, held, at)
            if not batch:
                return
            begin = max(0, len(held) - AHEAD)
            dropped = max(0, begin - AHEAD)
            held, kinds, begin = held[dropped:], kinds[dropped:], begin - dropped

    def _concluded_of(self, keys: Sequence[bytes]) -> Iterator[_Kinds]:
        """Yield the kinds of the hints in each line, and of those across the break before it."""
        if len(self._concluded) > MOST_SHAPES:
            self._concluded = {}
        new = {}
        for key in dict.fromkeys(keys):
            if key not in self._concluded:
                edge, _, shape = key.partition(b"\n")
                new[key] = edge, shape, edge + _REDUCED_PREFIX.sub(b"", shape)
        text = b"\n".join(both for *_, both in new.values())
        present = [
            (hint, kind) for hint, kinds in self._hints.items() if hint in text for kind in kinds
        ]
        for key, (edge, shape, both) in new.items():
            own = frozenset(kind for hint, kind in present if hint in shape)
            across = frozenset(
                kind for hint, kind in present
                if kind and hint in both and hint not in shape and hint not in edge
            )  # fmt: skip
            self._concluded[key] = own, across
        for key in keys:
            yield self._concluded[key]

    def _pieces(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        number = 1
        while raw := file.readline(LONGEST):
            self.blank = self.blank and not raw.strip()
            self.binary = self.binary or (number < BATCH and b"\0" in raw)
            for piece in raw.rstrip(b"\r\n").split(b"\r") if b"\r" in raw else (raw,):
                yield number, piece  # a progress bar returns to the beginning of its line
            number += raw.endswith(b"\n")
            self.count = number - raw.endswith(b"\n")


def _reduced(raw: bytes) -> bytes:
    if b"nan iterations" in raw:
        raw = _NO_NAN.sub(b"", raw)
    if b"0x" in raw:
        raw = _ADDRESS.sub(b"", raw)
    if b"\x1b" in raw:
        raw = _COLOUR.sub(b"", raw)
    return raw.translate(_LOWER, _DROPPED)


def _suspect(kinds: frozenset[str], held: Sequence[tuple[int, bytes]], at: int) -> Suspect:
    line = _clean(*held[at])
    after = tuple(_clean(*one) for one in held[at + 1 : at + 1 + AHEAD])
    before = tuple(_clean(*one) for one in held[max(0, at - BACK) : at])
    return Suspect(kinds, line, before, after)


def _clean(number: int, raw: bytes) -> Line:
    text, rank, lane = _COLOUR.sub(b"", raw).decode("utf-8", errors="replace"), None, None
    width = len(text.rstrip())
    for _ in range(5):
        prefix = _PREFIX.match(text)
        if prefix is None:
            break
        ranks = [int(one) for one in prefix.groups() if one is not None]
        if ranks:
            lane = ranks[0] if lane is None else lane
            # A bare [N] may be a number of anything; it names a rank if nothing else does.
            rank = ranks[0] if rank is None or "rank" in prefix[0] else rank
        text = text[prefix.end() :]
    return Line(number, rank, lane, text.strip(_BOX), width)


def continued(line: Line, after: Sequence[Line]) -> list[Line]:
    """Return a line and the lines that continue it, if a terminal has broken it.

    Lines of other ranks may be between them. A broken line has no room for the next one's first
    word, and the next one is not longer than that.
    """
    sentence, widest = [line], line.width
    for one in after:
        if one.lane not in (line.lane, None):
            continue
        last = sentence[-1]
        word = one.text.split(maxsplit=1)[0] if one.text else ""
        widest = max(widest, one.width)
        if not word or _BEGINS.match(one.text) or last.width < NARROWEST:
            break
        if last.width + 1 + len(word) <= widest:
            break
        sentence.append(one)
    return sentence
