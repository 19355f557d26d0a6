# SPDX-License-Identifier: Apache-2.0
"""Read the headers of a Hugging Face folder's safetensors files, and write such files.

A safetensors file is eight bytes with the length of its header, the header (JSON: dtype, shape and
byte range of every tensor), then the bytes. The library reads and checks headers. It cannot write a
file one tensor at a time, as is done here: `safetensors.torch.save_file` holds a whole file, twice.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from recipes.spec.units import GiB

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Supported dtypes of weights by their names in safetensors, and bytes per number."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """File, dtype and shape of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of the folder's safetensors by name.

    Raises ValueError for a folder of pickles, for one without weights or with two sets of them, for
    shards that are missing, truncated or different from the index, and for a dtype that is not in
    `BYTES`.
    """
    where = _places(folder)
    tensors: dict[str, Stored] = {}
    for file in sorted({folder / name for name in where.values()} or {folder / WHOLE}):
        for name, (dtype, shape) in _header(file).items():
            if dtype not in BYTES:
                raise ValueError(
                    f"{name} of {file} is {dtype}; weights here are {', '.join(BYTES)}, so convert "
                    "a quantized checkpoint to bfloat16 first"
                )
            if name in tensors or where.get(name, file.name) != file.name:
                other = tensors[name].file.name if name in tensors else where[name]
                raise ValueError(
                    f"{name} is in {file}, but {other} has it too or {INDEX} places it there; "
                    "download the checkpoint again"
                )
            tensors[name] = Stored(file=file, dtype=dtype, shape=shape)
    if absent := sorted(where.keys() - tensors.keys()):
        raise ValueError(
            f"{folder / where[absent[0]]} has no {absent[0]}, which it should have by {INDEX}; "
            "download both again"
        )
    return tensors


def _places(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; empty if all are in one file."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / WHOLE).is_file():
            return {}
        raise ValueError(_no_weights(folder))
    if (folder / WHOLE).is_file():
        raise ValueError(
            f"{folder} has both {WHOLE} and {INDEX}, and transformers would read only the first; "
            "remove the wrong one"
        )
    try:
        where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of shards ({error!r})") from error
    if not where or not all(isinstance(name, str) for name in where.values()):
        raise ValueError(
            f"{index} is not an index of shards: its weight_map is not a map to file names"
        )
    names = sorted(set(where.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names a file outside its folder: {outside[0]}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(names)} shards that {INDEX} names, "
            f"{missing[0]} the first; download it again"
        )
    return where


def _no_weights(folder: Path) -> str:
    pickles = sorted(file for pattern in _PICKLES for file in folder.glob(pattern))
    if not pickles:
        return f"{folder} has neither {WHOLE} nor {INDEX}; name a folder with safetensors weights"
    return (
        f"{folder} holds its weights as a pickle ({pickles[0].name}), which runs code as it loads; "
        'if you trust it, convert it: python -c "import transformers as t; m = '
        "t.AutoModelForCausalLM.from_pretrained('FOLDER', torch_dtype='auto'); "
        "m.save_pretrained('NEW', safe_serialization=True)\", and copy the tokenizer's files"
    )


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of one file, whose size must match its header."""
    try:
        with safe_open(file, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (of.get_dtype(), tuple(of.get_shape())) for name, of in slices.items()}
    except (OSError, SafetensorError) as error:
        if "unknown variant" in str(error):
            raise ValueError(
                f"{file} has weights of a type that is not known here ({error}); convert a "
                "quantized checkpoint to bfloat16 first"
            ) from error
        size = f" ({file.stat().st_size:,} bytes)" if file.is_file() else ""
        raise ValueError(
            f"{file}{size} is truncated, damaged or not a safetensors file: {error}; download it "
            "again"
        ) from error


class Shards:
    """Write tensors, in the planned order, into safetensors files of bounded size and an index."""

    def __init__(
        self, folder: Path, planned: Mapping[str, tuple[str, tuple[int, ...]]], max_gib: float
    ) -> None:
        """Plan tensors by name with dtype and shape; a tensor above `max_gib` has its own file.

        Raises ValueError if `max_gib` is not positive and finite.
        """
        if not (max_gib > 0 and math.isfinite(max_gib * GiB)):
            raise ValueError(f"max_shard_gib is {max_gib:g}; it must be above 0 and finite")
        self.folder = folder
        self._planned = planned
        self._files = _split(planned, int(max_gib * GiB))
        self._left = list(planned)
        self._stream: BinaryIO | None = None

    def write(self, name: str, content: memoryview) -> None:
        """Append the bytes of the next tensor.

        Raises ValueError for one out of order or of another size than planned.
        """
        expected = self._left.pop(0) if self._left else None
        size = _bytes(*self._planned[name]) if name == expected else None
        if size != content.nbytes:
            raise ValueError(f"{name} of {content.nbytes} bytes came where {expected} was planned")
        number = next(i for i, names in enumerate(self._files) if name in names)
        names = self._files[number]
        if name == names[0]:
            self._stream = (self.folder / (self._name(number) + ".part")).open("wb")
            self._stream.write(header({key: self._planned[key] for key in names}))
        assert self._stream is not None
        self._stream.write(content)
        if name == names[-1]:
            self._close(number)

    def finish(self) -> None:
        """Write the index if there are several files; raise ValueError if a tensor is missing."""
        if self._left:
            raise ValueError(f"{len(self._left)} tensors were not written, {self._left[0]} first")
        if len(self._files) == 1:
            return
        total = sum(_bytes(*described) for described in self._planned.values())
        where = {name: self._name(i) for i, names in enumerate(self._files) for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": where}
        (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _close(self, number: int) -> None:
        assert self._stream is not None
        part = Path(self._stream.name)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(part, part.with_suffix(""))

    def _name(self, number: int) -> str:
        if len(self._files) == 1:
            return WHOLE
        return f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"


def header(described: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the bytes before the data of these tensors in a file, with the format's padding."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    start = 0
    for name, (dtype, shape) in described.items():
        end = start + _bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return BYTES[dtype] * math.prod(shape)


def _split(planned: Mapping[str, tuple[str, tuple[int, ...]]], most: int) -> list[tuple[str, ...]]:
    """Return the tensor names of each file in order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, described in planned.items():
        if files[-1] and size + _bytes(*described) > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += _bytes(*described)
    return [tuple(names) for names in files]
