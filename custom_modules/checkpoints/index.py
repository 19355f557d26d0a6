# SPDX-License-Identifier: Apache-2.0
"""The index of a distributed checkpoint, read without running anything that it names.

`.metadata` of `torch.distributed.checkpoint`, which Megatron's `torch_dist` writes as well, is a
pickle: torch's `FileSystemReader.read_metadata` calls whatever the file asks for. An index needs a
few classes of torch and Megatron-Core, and none of them has side effects when constructed:
`ADMITTED`. Reading admits exactly these, by module and name; any other name ends the reading before
its module is imported.

    read        the index itself, of torch's classes, for torch
    outline     the data files it names and their least sizes, without importing torch

Standard library only, so that a checkpoint is refused before anything large is loaded.
"""

import pickle
from enum import EnumMeta as EnumType  # its name before 3.11
from pathlib import Path
from typing import IO, Any

INDEX = ".metadata"

_OF_TORCH = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # looks a name up in a table of layouts
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (
        "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    ),
}  # fmt: skip
_OF_MEGATRON = {
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}
_OF_PYTHON = {"pathlib": ("PosixPath",)}
"""Path classes of the system that the checkpoint was written on."""
DTYPES = (
    "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64", "float8_e4m3fn",
    "float8_e5m2", "int16", "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
)  # fmt: skip
ADMITTED = frozenset(
    (module, name)
    for modules in (_OF_TORCH, _OF_MEGATRON, _OF_PYTHON, {"torch": DTYPES})
    for module, names in modules.items()
    for name in names
)
"""Module and name of everything that an index may ask for."""
_MEMBER = ("builtins", "getattr")
"""Form of an enumeration's member in early releases of Python 3.11, such as Debian 12's."""


class CheckpointError(ValueError):
    """A checkpoint that must not be used; the message names the file, and says what to do."""

    def __init__(self, message: str, *, path: Path | None = None) -> None:
        """Take the file as well if there is one: its SHA-256 may say more."""
        super().__init__(message)
        self.path = path


class ForeignClassError(CheckpointError):
    """A checkpoint that asks for a name that no checkpoint needs."""

    def __init__(self, message: str, *, path: Path | None = None, asks: str = "") -> None:
        """Take also the name that the file asks for, as the end of a sentence about it."""
        super().__init__(message, path=path)
        self.asks = asks


class _Reader(pickle.Unpickler):
    """Unpickler that admits only names of `ADMITTED`."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of an admitted name; raise ForeignClassError for any other."""
        if (module, name) == _MEMBER:
            return self._member
        if (module, name) not in ADMITTED:
            raise self._foreign(f"{module}.{name}")
        return super().find_class(module, name)

    def _member(self, of: Any, name: Any) -> Any:
        """Return a member of an admitted enumeration, the only admitted use of `getattr`."""
        if not isinstance(of, EnumType) or name not in of.__members__:
            raise self._foreign(".".join(_MEMBER))
        return of[name]

    def _foreign(self, what: str) -> ForeignClassError:
        asks = f"asks for {what}"
        return ForeignClassError(
            f"{self._path} {asks}, which the index of a checkpoint does not need and which could "
            "run code: nothing of it was run; take the checkpoint from where it was written",
            path=self._path,
            asks=asks,
        )


class _Placeholder:
    """Placeholder for an object of any admitted class; keeps its state."""

    state: Any = None

    def __new__(cls, *_: Any) -> "_Placeholder":
        """Take and ignore the arguments of the original class."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Outline(_Reader):
    """Reads the same pickles into placeholders."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder for an admitted name; imports neither torch nor Megatron."""
        if (module, name) not in ADMITTED | {_MEMBER}:
            return super().find_class(module, name)
        return _Placeholder


def read(stream: IO[bytes]) -> Any:
    """Return the index in a stream, as torch's `read_metadata` would; raises CheckpointError.

    It is torch's `Metadata` or a subclass.
    """
    path = Path(str(getattr(stream, "name", INDEX)))
    index = _unpickled(_Reader(stream, path), path)
    if not hasattr(index, "state_dict_metadata"):
        raise _unreadable(path, f"it holds an object of {type(index).__name__}")
    return index


def outline(path: Path) -> dict[str, int]:
    """Return the data files that an index names, and the bytes that each must have at least.

    Raises CheckpointError for an index that is missing, damaged, that asks for a foreign class, or
    that names a file outside of its folder.
    """
    try:
        with path.open("rb") as stream:
            index = _unpickled(_Outline(stream, path), path)
    except OSError as error:
        raise _unreadable(path, (error.strerror or str(error)).lower()) from error
    try:
        stored = [info.state for info in index.state["storage_data"].values()]
        places = [(s["relative_path"], s["offset"], s["length"]) for s in stored]
    except (AttributeError, KeyError, TypeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    least: dict[str, int] = {}
    for name, offset, length in places:
        if [type(value) for value in (name, offset, length)] != [str, int, int]:
            raise _unreadable(path, "a place in it is not a name and two numbers")
        if name in ("", "..") or "\0" in name or Path(name).name != name:
            raise CheckpointError(
                f"{path} names the file {name!r}, outside of its folder; take the checkpoint from "
                "where it was written",
                path=path,
            )
        least[name] = max(offset + length, least.get(name, 0))
    return least


def _unpickled(reader: _Reader, path: Path) -> Any:
    """Return the object that a reader loads; a damaged pickle may raise almost anything."""
    try:
        return reader.load()
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        raise _unreadable(path, reason) from error


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not the whole index of a checkpoint ({why}); restore it from a copy, or take "
        "another checkpoint",
        path=path,
    )
