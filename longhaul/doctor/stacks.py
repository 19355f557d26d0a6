# SPDX-License-Identifier: Apache-2.0
"""The stacks that the guard against hangs wrote, and the rank that is in another place; light."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = "stacks"
SHOWN = 6
"""Innermost frames of Python that are shown of a rank."""
_FILE = re.compile(r"rank_(\d+)(_pyspy)?\.txt")
_OF_FAULTHANDLER = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_OF_PYSPY = re.compile(r"    (?P<name>.+) \((?P<file>[^()]*(?:\.py|<string>)):(?P<line>\d+)\)")
_THREAD = re.compile(r'^(?:Thread \S+ .*"MainThread"|Current thread|Thread 0x|Thread \S+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Where the main thread of a rank was."""

    rank: int
    file: Path
    """The file with all threads."""
    frames: tuple[str, ...]
    """Innermost first, as `name (file:line)`; empty if none can be read."""
    note: str = ""
    """Why py-spy could not read it; empty if it could, or was not there."""


def stacks(stage: Path) -> list[Stack]:
    """Return the stack of each rank that hung in the folder of a stage, in the order of ranks."""
    found: dict[int, dict[bool, Path]] = {}
    folder = stage / FOLDER
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        named = _FILE.fullmatch(file.name)
        if named is not None and file.is_file() and file.stat().st_size:
            found.setdefault(int(named[1]), {})[named[2] is not None] = file
    return [_stack(rank, files) for rank, files in sorted(found.items())]


def _stack(rank: int, files: dict[bool, Path]) -> Stack:
    note = ""
    for by_pyspy in (True, False):
        if by_pyspy not in files:
            continue
        text = files[by_pyspy].read_text(encoding="utf-8", errors="replace")
        if text.startswith("py-spy could not"):
            note = text.splitlines()[0]
            continue
        frames = tuple(_main_thread(text, by_pyspy=by_pyspy))
        if frames:
            return Stack(rank=rank, file=files[by_pyspy], frames=frames, note=note)
    return Stack(rank=rank, file=next(iter(files.values())), frames=(), note=note)


def _main_thread(text: str, *, by_pyspy: bool) -> Iterator[str]:
    """Yield the frames of Python in the main thread of the first process of a dump.

    py-spy names that thread; faulthandler writes it last.
    """
    pattern = _OF_PYSPY if by_pyspy else _OF_FAULTHANDLER
    threads: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif threads and (frame := pattern.match(line)) is not None:
            threads[-1][1].append(f"{frame['name']} ({_short(frame['file'])}:{frame['line']})")
    if by_pyspy:
        threads = [one for one in threads if '"MainThread"' in one[0]][:1]
    for _, frames in threads[-1:]:
        yield from frames[:SHOWN]


def _short(file: str) -> str:
    """Return the last parts of a path."""
    return "/".join(Path(file).parts[-3:]).removeprefix("/")


def groups(found: Sequence[Stack]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Return the ranks by where they are, the fewest first: the others wait for those."""
    places: dict[tuple[str, ...], list[int]] = {}
    for stack in found:
        places.setdefault(stack.frames, []).append(stack.rank)
    return sorted(places.items(), key=lambda one: len(one[1]))


def describe(found: Sequence[Stack]) -> Iterator[str]:
    """Yield in lines where the ranks were when the guard ended them."""
    places = groups(found)
    for frames, ranks in places:
        named = ", ".join(map(str, ranks[:16])) + (" and more" if len(ranks) > 16 else "")
        yield f"rank{'s' * (len(ranks) > 1)} {named}:"
        yield from (f"  {frame}" for frame in frames or ("its stack has no frame of Python",))
    if len(places) == 2 and len(places[0][1]) < len(places[1][1]):
        yield "The ranks named first are in another place than all others, which may wait for them."
    notes = list(dict.fromkeys(stack.note for stack in found if stack.note))
    yield from notes
