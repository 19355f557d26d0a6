# SPDX-License-Identifier: Apache-2.0
"""Verify that the files of a checkpoint are those that were written.

The marker of a checkpoint records the size and SHA-256 of every file when it was saved:

    longhaul.json     {..., "files": {"weights/__0_0.distcp": {"bytes": N, "sha256": "..."}, ...}}

`require_whole` compares sizes and reads the index, which takes milliseconds; commands call it
before they start ranks. `Reading` compares checksums in threads while the checkpoint is read.
Checkpoints of NeMo, and those of earlier versions without checksums, have no "files": only the
presence of the files in the index is checked, not their content.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from custom_modules.checkpoints.index import INDEX, CheckpointError, ForeignClassError, outline
from data.files.sha256 import Hashing, Part, sha256_of
from recipes.checkpoints.marker import MARKER, checkpoint_facts

FILES = "files"
"""Key in the marker."""
WEIGHTS = "weights"
CONTEXT = "context"
"""NeMo's record of the run, which contains pickles; never read here."""
HUGGING_FACE = "hugging_face"
"""Files of an import that only an export reads."""


class DamagedFileError(CheckpointError):
    """Raised for a file whose SHA-256 differs from the saved one."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """Size and SHA-256 of a file when it was saved."""

    bytes: int
    sha256: str


def described(checkpoint: Path, names: Iterable[str] | None = None) -> dict[str, SavedFile]:
    """Return the current state of files of a checkpoint by name; of all if `names` is None.

    Raises OSError for a file that cannot be read.
    """
    listed = sorted(saved_names(checkpoint) if names is None else names)
    sums = sha256_of([checkpoint / name for name in listed])
    return {
        name: SavedFile((checkpoint / name).stat().st_size, sha256)
        for name, sha256 in zip(listed, sums, strict=True)
    }


def saved_names(checkpoint: Path) -> list[str]:
    """Return the names of all files that a marker describes.

    It describes neither itself, nor the marker of an earlier save that it replaces, nor files that
    are still being written.
    """
    return [
        path.relative_to(checkpoint).as_posix()
        for path in checkpoint.rglob("*")
        if path.is_file()
        and path.name != MARKER
        and not (path.name.startswith(".") and path.suffix == ".tmp")
    ]


def for_marker(files: Mapping[str, SavedFile]) -> dict[str, dict[str, int | str]]:
    """Return the content of the marker's key "files"."""
    return {name: asdict(file) for name, file in sorted(files.items())}


def saved_files(checkpoint: Path, *, but: tuple[str, ...] = ()) -> dict[str, SavedFile] | None:
    """Return the files in a marker outside of the folders `but`; None if it lists no files.

    Raises CheckpointError for a malformed marker and for a file outside of the checkpoint.
    """
    facts = checkpoint_facts(checkpoint) or {}
    if FILES not in facts:
        return None
    try:
        files = {name: _saved_file(name, content) for name, content in facts[FILES].items()}
    except (AttributeError, TypeError, ValueError) as error:
        path = checkpoint / MARKER
        raise CheckpointError(
            f"{path} is damaged ({error}); restore it from a copy, or take another checkpoint",
            path=path,
        ) from error
    return {name: file for name, file in files.items() if PurePosixPath(name).parts[0] not in but}


def _saved_file(name: str, content: Mapping[str, Any]) -> SavedFile:
    """Return the marker's entry of one file; raise ValueError or TypeError if it is malformed."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError(f"it names {name!r}, which is not a file of the checkpoint")
    file = SavedFile(**content)
    if type(file.bytes) is not int or file.bytes < 0 or not isinstance(file.sha256, str):
        raise ValueError(f"the size or the SHA-256 of {name!r} is not valid")
    return file


def require_whole(checkpoint: Path) -> None:
    """Raise CheckpointError for a checkpoint that cannot be read, or would run code when read.

    The index is read without running code, and every file that the index or the marker names must
    have its size. Other files that Megatron or NeMo would unpickle are refused.
    """
    named, saved = require_index(checkpoint), saved_files(checkpoint) or {}
    for name, file in saved.items():
        if PurePosixPath(name).parts[0] not in (CONTEXT, HUGGING_FACE):
            _require_size(checkpoint / name, file.bytes, exactly=True)
    for path, least in named.items():
        try:
            _require_size(path, least, exactly=False)
        except CheckpointError as error:  # the fault may be the index's
            of_index = CheckpointError(str(error), path=weights_of(checkpoint) / INDEX)
            raise damage(checkpoint, saved, of_index) or error from None


def require_index(checkpoint: Path) -> dict[Path, int]:
    """Return the data files that a checkpoint's index names, and the bytes that each must have.

    Raises CheckpointError for an index that is damaged or would run code, and for other files that
    Megatron or NeMo would unpickle.
    """
    weights = weights_of(checkpoint)
    _require_safe(weights)
    try:
        named = outline(weights / INDEX)
    except ForeignClassError as error:
        raise damage(checkpoint, saved_files(checkpoint) or {}, error) or error from None
    return {weights / name: least for name, least in named.items()}


def weights_of(checkpoint: Path) -> Path:
    """Return the folder of the weights; Megatron FSDP writes them into the checkpoint folder."""
    weights = checkpoint / WEIGHTS
    return weights if weights.is_dir() else checkpoint


def _require_safe(weights: Path) -> None:
    """Raise CheckpointError if anything but tensors and an index would be unpickled."""
    if (state := weights / "modelopt_state").exists():
        raise CheckpointError(
            f"{state} is a pickle that NVIDIA's Model Optimizer would run; Longhaul does not need "
            "it: remove it, or take the checkpoint from before it was quantized"
        )
    config = weights / "metadata.json"
    if not config.exists():
        return
    try:
        backend = json.loads(config.read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{config} cannot be read ({error!r}); restore it from a copy, or take another "
            "checkpoint"
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{config} says that the checkpoint's format is {backend!r}; Longhaul reads torch_dist"
        )


def _require_size(path: Path, size: int, *, exactly: bool) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; restore it from a copy, or take another checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if found < size or (exactly and found != size):
        raise CheckpointError(
            f"{path} has {found:,} bytes where {size:,} were written; restore it from a copy, or "
            "take another checkpoint"
        )


def require_undamaged(checkpoint: Path, folder: str) -> None:
    """Raise CheckpointError for a file in `folder` that differs from the saved one."""
    files = saved_files(checkpoint) or {}
    chosen = {name: file for name, file in files.items() if Path(name).parts[0] == folder}
    with Reading(checkpoint, chosen) as reading:
        for sentence in reading.damaged():
            raise DamagedFileError(sentence)


def damage(
    checkpoint: Path, files: Mapping[str, SavedFile], refused: CheckpointError
) -> DamagedFileError | None:
    """Return the error to raise instead of a refusal if the file's SHA-256 differs.

    A flipped bit in the name of a class can look like a file that would run code.
    """
    path = refused.path
    if path is None or not path.is_relative_to(checkpoint) or isinstance(refused, DamagedFileError):
        return None
    name = path.relative_to(checkpoint).as_posix()
    if name not in files:
        return None
    with Hashing([Part(path)]) as hashing:
        (result,) = hashing.results()
    if result == files[name].sha256:
        return None
    if isinstance(refused, ForeignClassError) and isinstance(result, str):
        return DamagedFileError(
            f"{path} is damaged: its SHA-256 differs from what was written, and it {refused.asks}; "
            "nothing of it was run; restore it from a copy, or take another checkpoint",
            path=path,
        )
    return DamagedFileError(_damaged(checkpoint, name, result), path=path)


def note(checkpoint: Path, verify: bool) -> str | None:
    """Return why the content of a checkpoint is not verified, or None if it is."""
    if not verify:
        return f"{checkpoint} is not verified, as --no-verify asks"
    if saved_files(checkpoint) is None:
        return f"{checkpoint} was saved without SHA-256 sums and is not verified"
    return None


class Reading:
    """The checksums of a checkpoint's files, computed in threads from construction on.

    Each of `ranks` that read the checkpoint together computes a share of about equal bytes.
    """

    def __init__(
        self, checkpoint: Path, files: Mapping[str, SavedFile], *, rank: int = 0, ranks: int = 1
    ) -> None:
        """Start the threads for this rank's share."""
        self._checkpoint = checkpoint
        self._share = share(files, rank, ranks)
        self._hashing = Hashing([Part(checkpoint / name) for name in self._share])
        self.bytes = sum(file.bytes for file in files.values())

    def damaged(self) -> list[str]:
        """Return one sentence for each file of the share that differs from the saved one."""
        results = zip(self._share.items(), self._hashing.results(), strict=True)
        return [
            _damaged(self._checkpoint, name, result)
            for (name, file), result in results
            if result != file.sha256
        ]

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *exception: object) -> None:
        self._hashing.__exit__(*exception)


def share(files: Mapping[str, SavedFile], rank: int, ranks: int) -> dict[str, SavedFile]:
    """Return the files that a rank hashes: largest first, each to the rank with fewest bytes."""
    loads = [0] * ranks
    mine = {}
    for name, file in sorted(files.items(), key=lambda pair: (-pair[1].bytes, pair[0])):
        to = loads.index(min(loads))
        loads[to] += file.bytes
        if to == rank:
            mine[name] = file
    return mine


def _damaged(checkpoint: Path, name: str, result: str | OSError) -> str:
    path = checkpoint / name
    if isinstance(result, OSError):
        return f"{path} cannot be read ({result.strerror}); restore it from a copy"
    return (
        f"{path} is damaged: its SHA-256 differs from what was written; restore it from a copy, "
        "take another checkpoint, or give --no-verify to the command that is to use it as it is"
    )
