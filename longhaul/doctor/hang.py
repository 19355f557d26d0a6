# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor hang`: what the ranks wrote when they hung, and which ranks did not.

Ranks write two things: their last collectives, where a collective of NCCL reached its timeout
(`slurm.flight_recorder`), and their stacks, where the guard ended a step that took too long.

Files of collectives are pickles of dicts, lists, strings and numbers. They are read by an unpickler
that admits no name at all, so that a file can run no code; one that needs a name is not read.
"""

import pickle
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.run_folder import StageResults, load
from longhaul.doctor.log import content as log_content
from longhaul.doctor.log import describe
from longhaul.doctor.logs.reader import Log, logs_of, read
from longhaul.doctor.stage_files import stage_facts
from longhaul.options import Json, RunArgument, RunOption, print_json, run_of
from longhaul.run_folder.stage_named import stage_named
from longhaul.terminal.messages import next_command
from recipes.spec.naming import counted, stage_folder
from slurm.flight_recorder import FOLDER, PREFIX, Dump, dumps

NAMED = 16
"""Ranks that are named one by one; more are counted."""
LARGEST_BYTES = 256 * 2**20
"""Size above which a file is not read: a rank keeps some thousand collectives."""
STACKS = "stacks"
"""Folder of a stage with the stacks of its ranks."""
SHOWN = 6
"""Innermost frames of Python that are shown of a rank."""
_FILE = re.compile(r"rank_(\d+)(_pyspy)?\.txt")
_OF_FAULTHANDLER = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_OF_PYSPY = re.compile(r"    (?P<name>.+) \((?P<file>[^()]*(?:\.py|<string>)):(?P<line>\d+)\)")
_THREAD = re.compile(r'^(?:Thread \S+ .*"MainThread"|Current thread|Thread 0x|Thread \S+)')


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a dump has no need of")


@dataclass(frozen=True, kw_only=True, slots=True)
class Last:
    """The newest collective of a rank in one process group."""

    number: int
    what: str
    """Operation and sizes."""
    state: str
    """scheduled, started or completed."""
    place: str
    """Where it was called; empty if the dump has no stack."""


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


def hang(
    given: RunArgument = None,
    run: RunOption = None,
    stage: Annotated[
        str, typer.Option(help="A stage of the run.", show_default="the one with the newest dump")
    ] = "",
    as_json: Json = False,
) -> None:
    """Find where the ranks hung: their stacks and last collectives, and which wrote nothing."""
    run = run_of(given, run)
    if run.is_file():
        raise ValueError(f"{run} is a file; `longhaul doctor log` reads logs")
    record, stages = load(run)
    stage = stage and stage_named(run, stage, record.stages)
    asked = [one for one in stages if stage in ("", one.name)]
    found = [(dump, one) for one in asked for dump in dumps(stage_folder(run, one.name))]
    hung = [(each, one) for one in asked if (each := stacks(stage_folder(run, one.name)))]
    stated, lines, command = dict[str, object](), list[str](), list[str]()
    if found:
        dump, here = max(found, key=lambda one: one[0].last)
        world, (collectives, unread) = _world_size(run, here), _collectives(dump)
        late, silent = list(behind(collectives)), dump.silent(world) if world else ()
        command = dump.command(complete=not silent)
        stated = {**_content(dump, here, world, command), "behind": late, "stacks": []}
        lines = [*_when(dump, here, world, silent), *late, *unread]
    if hung:
        of_stacks, here = hung[-1]
        places = [{"ranks": who, "frames": list(where)} for where, who in groups(of_stacks)]
        stated = {"stage": here.name, **stated, "stacks": places}
        lines += _where(of_stacks, here)
    log = _what_logs_tell(run, asked)
    if as_json:
        print_json({**stated, "log": log_content(log)} if stated or log.faults else None)
        return
    if not stated:
        place = stage_folder(run, stage) if stage else f"a stage of {run}"
        lines = [
            f"{place} has no dump in its folder {FOLDER}: no collective of NCCL reached its "
            "timeout, or its ranks were killed before they wrote. Ranks on CPUs write none. Its "
            f"folder {STACKS} has no stacks either: the guard has ended no rank."
        ]
    for line in (*lines, *(describe(log, run) if log.faults else ())):
        typer.echo(line)
    if command:
        next_command(
            command,
            "compare all collectives of the ranks (it unpickles the files, so only of your own "
            "jobs)",
        )


def _what_logs_tell(run: Path, stages: Sequence[StageResults]) -> Log:
    """Return what the newest output of the ranks tells; nothing without output."""
    for stage in reversed(stages):
        log = read(logs_of(run, stage.name))
        if log.faults:
            return log
    return Log()


def _collectives(dump: Dump) -> tuple[dict[int, dict[str, Last]], list[str]]:
    """Return the last collectives of each rank, and why files cannot be read."""
    read, unread = dict[int, dict[str, Last]](), []
    for rank in dump.ranks:
        try:
            read[rank] = last_collectives(dump.folder / f"{PREFIX}{rank}")
        except ValueError as error:
            unread.append(str(error))
    return read, unread


def _when(
    dump: Dump, stage: StageResults, world: int | None, silent: Sequence[int]
) -> Iterator[str]:
    """Yield when the ranks wrote, and which did not."""
    span = dump.last - dump.first
    # not ranks of an older, larger attempt
    ranks = [rank for rank in dump.ranks if not world or rank < world]
    at = datetime.fromtimestamp(dump.first, timezone.utc).astimezone().strftime("%F %T %z")
    yield (
        f"{stage.name}: at {at} a collective reached its timeout or failed. "
        f"{counted(len(ranks), 'rank')}{f' of {world:,}' if world else ''} wrote their last "
        f"collectives{f' within {span:,.0f} s' if span >= 1 else ''} to {dump.folder}"
    )
    if silent:
        yield (
            f"{counted(len(silent), 'rank')} wrote none ({_named(silent)}): they had ended, or "
            "their node was not reached; look at their output first"
        )
    elif world:
        yield (
            "Every rank wrote, also one that hangs outside of NCCL: the one whose last collective "
            "is behind that of the others."
        )


def _content(
    dump: Dump, stage: StageResults, world: int | None, command: Sequence[str]
) -> dict[str, object]:
    return {
        "stage": stage.name,
        "folder": str(dump.folder),
        "prefix": PREFIX,
        "ranks": list(dump.ranks),
        "silent_ranks": list(dump.silent(world)) if world else None,
        "world_size": world,
        "first_unix_seconds": dump.first,
        "last_unix_seconds": dump.last,
        "command": shlex.join(command),
    }


def _world_size(run: Path, stage: StageResults) -> int | None:
    """Return the ranks of a stage by its recipe; None if that does not state them."""
    facts = stage_facts(run, stage)
    nodes, each = facts.of_recipe("trainer.num_nodes"), facts.of_recipe("trainer.devices")
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None


def last_collectives(file: Path) -> dict[str, Last]:
    """Return the newest collective of each process group in a dump, by the group's name.

    Raises ValueError for a file that is not such a dump.
    """
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"{file} has more than {LARGEST_BYTES:,} bytes")
        with file.open("rb") as stream:
            content = _Plain(stream).load()
        entries = content["entries"]
        newest: dict[str, Last] = {}
        for entry in entries:
            if entry.get("is_p2p"):
                continue
            group = " ".join(dict.fromkeys(map(str, entry["process_group"])))
            number = int(entry["collective_seq_id"])
            if group not in newest or number >= newest[group].number:
                newest[group] = Last(
                    number=number, what=_what(entry), state=str(entry["state"]),
                    place=_place(entry),
                )  # fmt: skip
    except (pickle.UnpicklingError, EOFError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a dump of the flight recorder ({error!r})") from None
    return newest


def _what(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    sizes = " ".join("x".join(map(str, size)) for size in entry.get("input_sizes") or ())
    kinds = " ".join(dict.fromkeys(map(str, entry.get("input_dtypes") or ())))
    return " ".join(filter(None, (name, sizes, kinds)))


def _place(entry: Mapping[str, Any]) -> str:
    """Return where a collective was called: the innermost frame outside of torch.distributed."""
    for frame in entry.get("frames") or ():
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and "torch/distributed" not in file:
            return f"{frame.get('name')} ({'/'.join(Path(file).parts[-3:])}:{frame.get('line')})"
    return ""


def behind(ranks: Mapping[int, Mapping[str, Last]]) -> Iterator[str]:
    """Yield in sentences which ranks are behind in a group, or called something else than others.

    Groups in which all ranks are at the same completed collective are left out.
    """
    groups: dict[str, dict[int, Last]] = {}
    for rank, newest in ranks.items():
        for group, last in newest.items():
            groups.setdefault(group, {})[rank] = last
    for group, of_ranks in sorted(groups.items()):
        first = max(last.number for last in of_ranks.values())
        late = sorted(rank for rank, last in of_ranks.items() if last.number < first)
        ahead = next(last for last in of_ranks.values() if last.number == first)
        where = f", called in {ahead.place}" if ahead.place else ""
        if late:
            last = of_ranks[late[0]]
            at = f", called in {last.place}" if last.place else ""
            yield (
                f"group {group}: {_ranks(late)} {'have' if len(late) > 1 else 'has'} not called "
                f"collective {first:,} ({ahead.what}{where}), in which the others wait; the last "
                f"{'they' if len(late) > 1 else 'it'} called is {last.number:,} ({last.what}{at})"
            )
            continue
        calls: dict[str, list[int]] = {}
        for rank, last in of_ranks.items():
            calls.setdefault(last.what, []).append(rank)
        if len(calls) > 1:
            shown = "; ".join(f"{_ranks(sorted(who))}: {what}" for what, who in calls.items())
            yield f"group {group}: collective {first:,} is not the same on all ranks: {shown}"
        elif ahead.state != "completed":
            yield (
                f"group {group}: all ranks are in collective {first:,} ({ahead.what}{where}), "
                f"{ahead.state}: a link or a GPU, if it does not end"
            )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {_named(numbers)}"


def _named(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - NAMED:,} more" if len(numbers) > NAMED else ""
    return f"{', '.join(map(str, numbers[:NAMED]))}{more}"


def stacks(stage: Path) -> list[Stack]:
    """Return the stack of each rank that hung in the folder of a stage, in the order of ranks."""
    found: dict[int, dict[bool, Path]] = {}
    folder = stage / STACKS
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


def _where(found: Sequence[Stack], stage: StageResults) -> Iterator[str]:
    """Yield where the ranks were when the guard ended them."""
    yield (
        f"{stage.name}: the guard ended {counted(len(found), 'rank')} that hung; the stacks of all "
        f"threads are in {found[0].file.parent}"
    )
    places = groups(found)
    for frames, ranks in places:
        yield f"{_ranks(ranks)}:"
        yield from (f"  {frame}" for frame in frames or ("its stack has no frame of Python",))
    if len(places) == 2 and len(places[0][1]) < len(places[1][1]):
        yield "The ranks named first are in another place than all others, which may wait for them."
    yield from dict.fromkeys(stack.note for stack in found if stack.note)
