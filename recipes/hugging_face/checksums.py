# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of the files of a Hugging Face folder, in the format of `sha256sum`.

    DIR/SHA256SUMS      a line a file: its sum, two blanks, its name

An export has it, and `sha256sum -c SHA256SUMS` in the folder compares the files too. Folders of
others mostly have none: they are taken as they are, which is noted.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from data.files.sha256 import sha256_of
from data.hub import matching
from recipes.checkpoints.files import DamagedFileError, Reading, SavedFile

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def write_sums(folder: Path) -> None:
    """Write the sums of all files of a folder, after which none of them may change."""
    files = [file for file in matching(folder, ("**/*",)) if file != folder / SUMS]
    names = (file.relative_to(folder).as_posix() for file in files)
    lines = zip(sha256_of(files), names, strict=True)
    text = "".join(f"{sha256}  {name}\n" for sha256, name in lines)
    (folder / SUMS).write_text(text, encoding="utf-8")


def unverified(folder: Path, *, verify: bool = True, patterns: Sequence[str] = ("*",)) -> str:
    """Compare files of a folder with its sums; return why it was not done, empty if it was.

    Only files whose names match one of `patterns` are compared. Raises DamagedFileError for one
    that differs or cannot be read, and ValueError for sums that cannot be read.
    """
    if not verify:
        return f"{folder} is not verified, as --no-verify asks"
    if not (folder / SUMS).is_file():
        return f"{folder} has no {SUMS}, so its files are not verified"
    listed = _stated(folder / SUMS)
    for sentence in _damaged(folder, listed, patterns):
        raise DamagedFileError(sentence)
    weights = matching(folder, ("*.safetensors",))
    if bare := [file.name for file in weights if file.name not in listed]:
        return f"{folder / SUMS} has no sum of {', '.join(bare[:3])}, which is not verified"
    return ""


def damages(folder: Path) -> list[str]:
    """Return a sentence for each file of a folder that differs from its sum.

    Raises ValueError for sums that cannot be read.
    """
    return _damaged(folder, _stated(folder / SUMS), ("*",))


def _damaged(folder: Path, listed: Mapping[str, str], patterns: Sequence[str]) -> list[str]:
    files = {
        name: SavedFile(0, sha256)
        for name, sha256 in listed.items()
        if any(fnmatch(name, pattern) for pattern in patterns) and _is_read(folder / name)
    }
    with Reading(folder, files) as reading:
        return reading.damaged()


def _is_read(file: Path) -> bool:
    """Return whether a file is there, or is one without which a model is not whole."""
    return file.exists() or file.suffix in (".safetensors", ".json", ".model")


def _stated(file: Path) -> dict[str, str]:
    found = {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        name = "" if match is None else match[2].removeprefix("./")
        if match is None or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"{file} line {number} is {line[:100]!r}; expected a SHA-256, two blanks and the "
                "name of a file in the folder, as sha256sum writes"
            )
        found[name] = match[1].lower()
    return found
