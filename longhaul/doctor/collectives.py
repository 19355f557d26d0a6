# SPDX-License-Identifier: Apache-2.0
"""Last collectives of the ranks in a dump of PyTorch's flight recorder, and ranks behind; light.

The files are pickles of dicts, lists, strings and numbers. They are read by an unpickler that
admits no name at all, so that a file can run no code; one that needs a name is not read.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST_BYTES = 256 * 2**20
"""Size above which a file is not read: a rank keeps some thousand collectives."""


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


def _ranks(numbers: list[int]) -> str:
    named = ", ".join(map(str, numbers[:16]))
    more = f" and {len(numbers) - 16:,} more" if len(numbers) > 16 else ""
    return f"rank{'s' * (len(numbers) > 1)} {named}{more}"
