# SPDX-License-Identifier: Apache-2.0
"""Reading of `torch.distributed.checkpoint`, and so Megatron's, that runs nothing from a file.

Two places of torch 2.13 unpickle whatever a checkpoint holds:

    filesystem.py       FileSystemReader.read_metadata      pickle.load of `.metadata`
    default_planner.py  DefaultLoadPlanner.load_bytes       torch.load(..., weights_only=False) of
                                                            states other than tensors

`read_safely` puts `custom_modules.checkpoint_index.read` in the place of the first, for every
reader below torch's, and in the place of the second a load with `weights_only=True`, whose
unpickler admits tensors, plain values and the classes that Megatron-Core registers. It also names
the file that could not be read. `common.pt`, which Megatron reads by torch's default, is tried with
`weights_only=True` by `require_common`.

Not covered: Transformer Engine keeps its FP8 state as a tensor of bytes, and unpickles these itself
when a module loads its extra state.
"""

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

from custom_modules.checkpoint_index import CheckpointError, ForeignClassError, read

_PICKLE = SimpleNamespace(dump=pickle.dump, load=read)
"""All of pickle that torch's file system reader and writer use."""


def read_safely() -> None:
    """Have this process read distributed checkpoints safely from now on; again changes nothing."""
    filesystem.pickle = _PICKLE  # type: ignore[assignment, attr-defined]
    reader, planner = filesystem.FileSystemReader, default_planner.DefaultLoadPlanner
    if not hasattr(reader.read_data, "names_files"):
        reader.read_data = _naming_files(reader.read_data)  # type: ignore[method-assign]
    planner.load_bytes = _load_bytes  # type: ignore[method-assign]


def require_common(path: Path) -> None:
    """Raise CheckpointError for a `common.pt` that is missing, damaged, or that would run code."""
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ForeignClassError(f"{path} {_foreign(path, 'its state')}") from error
    except (EOFError, OSError, RuntimeError) as error:
        raise CheckpointError(_unreadable(path, error)) from error


class _ForeignStateError(ForeignClassError):
    """Says what a state asks for, where the file that holds it is not known."""


def _naming_files(read_data: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's reading of tensors and states, file by file, with the file in its errors."""

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
                raise ForeignClassError(f"{path} {error}") from None
            except torch.OutOfMemoryError:
                raise
            except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
                raise CheckpointError(_unreadable(path, error)) from error
        return done

    read_each.names_files = True  # type: ignore[attr-defined]
    return read_each


def _load_bytes(
    self: default_planner.DefaultLoadPlanner, read_item: ReadItem, value: BytesIO
) -> None:
    """Read a state other than a tensor safely, and put it where torch's own method does."""
    name = read_item.dest_index.fqn
    try:
        state = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        value.seek(0)
        raise _ForeignStateError(_foreign(value, name)) from error
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], state)
    else:
        self.state_dict[name] = state


def _unreadable(path: Path, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return (
        f"{path} cannot be read ({reason}); it is cut off or damaged: restore it from a copy, or "
        "take another checkpoint"
    )


def _foreign(value: BytesIO | Path, state: str) -> str:
    """Return what a state asks for that is not admitted, after the name of its file."""
    try:
        names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(value))
    except Exception:  # the file breaks any parser that it likes
        names = ""
    asks = f"asks for {names} in {state}" if names else f"holds {state}, which breaks the loading"
    return (
        f"{asks}: a state of a checkpoint does not need it and it could run code; nothing of it "
        "was run; take the checkpoint from where it was written"
    )
