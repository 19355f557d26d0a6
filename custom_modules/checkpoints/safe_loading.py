# SPDX-License-Identifier: Apache-2.0
"""Safe reading of `torch.distributed.checkpoint`, and so Megatron's: no code from a file runs.

Two places in torch 2.13 unpickle whatever a checkpoint has:

    filesystem.py       FileSystemReader.read_metadata      pickle.load of `.metadata`
    default_planner.py  DefaultLoadPlanner.load_bytes       torch.load(..., weights_only=False) of
                                                            states other than tensors

`read_safely` replaces the first by `custom_modules.checkpoints.index.read`, for every subclass of
torch's reader, and the second by a load with `weights_only=True`, whose unpickler admits tensors,
plain values and the classes that Megatron-Core registers. It also adds the name of a file that
could not be read. `common.pt`, which Megatron reads by torch's default, is tried with
`weights_only=True` by `require_common`.

A third place is in Transformer Engine, which unpickles the FP8 states of modules. Such a state is
in a data file or in `common.pt`; `custom_modules.checkpoints.extra_states` checks both first.
"""

import errno
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from custom_modules.checkpoints.extra_states import SUFFIX, what_it_asks
from custom_modules.checkpoints.index import CheckpointError, ForeignClassError, read

_PICKLE = SimpleNamespace(dump=pickle.dump, load=read)
"""The part of pickle that torch's file system reader and writer use."""


def read_safely() -> None:
    """Make this process read distributed checkpoints safely from now on; may be called again."""
    filesystem.pickle = _PICKLE  # type: ignore[assignment, attr-defined]
    reader, planner = filesystem.FileSystemReader, default_planner.DefaultLoadPlanner
    if not hasattr(reader.read_data, "names_files"):
        reader.read_data = _naming_files(reader.read_data)  # type: ignore[method-assign]
    planner.load_bytes = _load_bytes  # type: ignore[method-assign]


def require_common(path: Path) -> None:
    """Raise CheckpointError for a `common.pt` that is missing, damaged, or that would run code."""
    try:
        _require_admitted(_load(path, "its state"))
    except _ForeignStateError as error:
        raise _foreign(path, error.asks) from None
    except Exception as error:
        if not is_of_content(error):
            raise
        raise _unreadable(path, error) from error


def is_of_content(error: BaseException) -> bool:
    """Whether an error is due to a file's damaged content, and not to a lack of resources.

    For a flipped byte torch's parsers raise almost anything, so their errors are recognised by the
    place in the traceback.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOENT, errno.EIO)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    if isinstance(error, EOFError | pickle.UnpicklingError | UnicodeDecodeError):
        return True
    words = str(error)
    if isinstance(error, RuntimeError) and "PytorchStreamReader" in words:
        return True
    return _is_of_parsing(error) and "allocate memory" not in words


def _is_of_parsing(error: BaseException) -> bool:
    """Whether an exception was raised below `torch.load`."""
    link = error.__traceback__
    while link is not None:
        if link.tb_frame.f_globals.get("__name__") == torch.serialization.__name__:
            return True
        link = link.tb_next
    return False


class _ForeignStateError(ForeignClassError):
    """Has the name that a state asks for, without the file, which is not known there."""

    def __init__(self, asks: str) -> None:
        super().__init__(asks, asks=asks)


def _naming_files(read_data: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's reader of tensors and states, with the file's path in its errors."""

    @wraps(read_data)
    def read_each(self: filesystem.FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            by_file.setdefault(stored.relative_path, []).append(item)
        done = read_data(self, replace(plan, items=[]), planner)
        for name, items in by_file.items():
            path = Path(self.path) / name
            try:
                done = read_data(self, replace(plan, items=items), planner)
            except _ForeignStateError as error:
                raise _foreign(path, error.asks) from None
            except Exception as error:
                if not is_of_content(error):
                    raise
                raise _unreadable(path, error) from error
        return done

    read_each.names_files = True  # type: ignore[attr-defined]
    return read_each


def _load_bytes(
    self: default_planner.DefaultLoadPlanner, read_item: ReadItem, value: BytesIO
) -> None:
    """Read a state other than a tensor safely, and store it as torch's own method does."""
    name = read_item.dest_index.fqn
    state = _load(value, name)
    if SUFFIX in name:
        # Megatron saves a list; in a tensor instead, each row would be a state
        _require_extra_states(name, state if type(state) is list else [()])
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], state)
    else:
        self.state_dict[name] = state


def _load(value: BytesIO | Path, name: str) -> Any:
    """Return the saved object; raise _ForeignStateError if it names a class not admitted."""
    place = "cpu" if isinstance(value, Path) else None
    try:
        return torch.load(value, map_location=place, weights_only=True)
    except pickle.UnpicklingError as error:
        if names := _foreign_names(value):
            raise _ForeignStateError(f"asks for {names} in {name}") from error
        raise


def _foreign_names(value: BytesIO | Path) -> str:
    """Return the names in a file that are not admitted; empty if its pickle is damaged before."""
    if isinstance(value, BytesIO):
        value.seek(0)
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(value)))
    except Exception:  # a damaged file may raise almost anything
        return ""


def _require_admitted(state: Any) -> None:
    """Raise _ForeignStateError for a state of a module, anywhere in a tree, that would run code."""
    children = state.items() if isinstance(state, dict) else ()
    for name, value in children:
        if SUFFIX in str(name):
            _require_extra_states(str(name), [value])
        _require_admitted(value)
    for value in state if isinstance(state, list | tuple) else ():
        _require_admitted(value)


def _require_extra_states(name: str, states: list[Any]) -> None:
    """Raise _ForeignStateError if a module's states are not those of Transformer Engine."""
    for state in states:
        if (asks := what_it_asks(name, state)) is not None:
            raise _ForeignStateError(asks)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    words = str(error).partition("WeightsUnpickler error:")[2] or str(error)  # without its advice
    reason = f"{type(error).__name__}: {words.strip()}".partition("\n")[0]
    return CheckpointError(
        f"{path} cannot be read ({reason}); it is cut off or damaged: restore it from a copy, or "
        "take another checkpoint",
        path=path,
    )


def _foreign(path: Path, asks: str) -> ForeignClassError:
    return ForeignClassError(
        f"{path} {asks}: a state of a checkpoint does not need it and it could run code; nothing "
        "of it was run; take the checkpoint from where it was written",
        path=path,
        asks=asks,
    )
