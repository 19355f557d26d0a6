# SPDX-License-Identifier: Apache-2.0
"""The lines of a log that may tell of a fault, with those that continue them.

A log may have any size. Its lines repeat, but for their numbers: a line is reduced to lower case
without digits and white space, and what was concluded of it once holds for all that reduce to the
same. Hints are looked for in all new lines of a batch at once, which is much faster than line by
line. Only a line with a hint is parsed, and so is a line with a hint across its end: a terminal
breaks a sentence between two words or within one, below a rank's prefix or not.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import BinaryIO, NamedTuple

LONGEST = 2**13
"""Bytes after which a line is read as if it were broken there."""
AHEAD = 12
"""Lines in which the rest of a sentence is looked for."""
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
    text: str
    width: int
    """Columns with what is in front of it."""


class Suspect(NamedTuple):
    """A line with a hint, or across whose end a hint lies."""

    kinds: frozenset[str]
    lines: list[Line]
    """The line, and those that continue it if a terminal has broken it."""


class _Read(NamedTuple):
    """A line as it is read, with the kinds of hints in it, and across the break before it."""

    number: int
    raw: bytes
    own: frozenset[str] = frozenset()
    across: frozenset[str] = frozenset()


_END = _Read(0, b"")


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
        self._concluded: dict[bytes, tuple[frozenset[str], frozenset[str]]] = {}
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
        ahead = deque[_Read]()
        for read in chain(self._lines(file), repeat(_END, AHEAD + 1)):
            ahead.append(read)
            if len(ahead) <= AHEAD + 1:
                continue
            number, raw, own, _ = ahead.popleft()
            if "" in own:
                self._last.append((number, raw))
            if kinds := (own | ahead[0].across) - {""}:
                after = (_clean(one.number, one.raw) for one in ahead if one is not _END)
                yield Suspect(kinds, _continued(_clean(number, raw), after))

    def _lines(self, file: BinaryIO) -> Iterator[_Read]:
        """Yield each line with the kinds of its hints, and of those across the break before it."""
        pieces, edge = self._pieces(file), b""
        while batch := list(islice(pieces, BATCH)):
            shapes = [_reduced(raw) for _, raw in batch]
            edges = [edge, *(shape[-EDGE:] for shape in shapes)]
            edge = edges.pop()
            keys = [b"\n".join(pair) for pair in zip(edges, shapes, strict=True)]
            self._conclude(keys)
            for (number, raw), key in zip(batch, keys, strict=True):
                yield _Read(number, raw, *self._concluded[key])

    def _conclude(self, keys: Sequence[bytes]) -> None:
        """Look for hints in the lines that are new, all at once."""
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


def _clean(number: int, raw: bytes) -> Line:
    text, rank = _COLOUR.sub(b"", raw).decode("utf-8", errors="replace"), None
    width = len(text.rstrip())
    for _ in range(5):
        prefix = _PREFIX.match(text)
        if prefix is None:
            break
        ranks = [int(one) for one in prefix.groups() if one is not None]
        if ranks:
            # A bare [N] may be a number of anything; it names a rank if nothing else does.
            rank = ranks[0] if rank is None or "rank" in prefix[0] else rank
        text = text[prefix.end() :]
    return Line(number, rank, text.strip(_BOX), width)


def _continued(line: Line, after: Iterable[Line]) -> list[Line]:
    """Return a line and the lines that continue it, if a terminal has broken it.

    A broken line has no room for the next one's first word, and the next one is not longer.
    """
    sentence, widest = [line], line.width
    for one in after:
        last, word = sentence[-1], one.text.partition(" ")[0]
        widest = max(widest, one.width)
        if not word or one.rank not in (line.rank, None) or _BEGINS.match(one.text):
            break
        if last.width < NARROWEST or last.width + 1 + len(word) <= widest:
            break
        sentence.append(one)
    return sentence
