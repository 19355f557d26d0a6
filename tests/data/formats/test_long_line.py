# SPDX-License-Identifier: Apache-2.0
"""A long JSON line is read as any other, and refused with its size where it is too long."""

import gzip
import json
from pathlib import Path

import pytest

from data.formats import jsonl
from data.formats.jsonl import jsonl_file
from data.formats.records import Unusable, WholeText
from data.readers import SourceError, documents

BEFORE, AFTER = '{"text": "before it"}\n', '{"text": "after it"}\n'


@pytest.fixture(autouse=True)
def most(monkeypatch: pytest.MonkeyPatch) -> int:
    """Have lines of up to 100 bytes read, and their remainder in blocks of 7."""
    monkeypatch.setattr(jsonl, "MOST_LINE_BYTES", 100)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 7)
    return 100


def line_of(size: int) -> str:
    """Return a line with this many bytes, the line break included."""
    bare = json.dumps({"text": ""}) + "\n"
    return json.dumps({"text": "x" * (size - len(bare))}) + "\n"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("size", [101, 102, 106, 107, 108, 1000])
def test_a_longer_line_is_refused_with_its_size_and_place(tmp_path, size, packed) -> None:
    content = (BEFORE + line_of(size) + AFTER).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(SourceError, match=rf"a\.jsonl:2: the line has {size:,} bytes, more than"):
        list(documents(str(path)))
    read = list(documents(str(path), skip_broken=True))
    assert [document.text for document in read] == ["before it", "after it"]
    assert [document.origin for document in read] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize("end", ["\n", ""])
def test_the_longest_line_is_read_and_the_bytes_after_it_are_counted(tmp_path, most, end) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line_of(most) + line_of(most + 50) + AFTER.removesuffix("\n") + end)
    first, second, third = (content for _, content in jsonl_file(path, "text"))
    assert first == json.loads(line_of(most))["text"]
    assert isinstance(second, Unusable)
    assert third == "after it"
    rest = jsonl_file(path, "text", start=most, stop=2 * most + 50)
    assert [type(content) for _, content in rest] == [Unusable]


def test_a_long_last_line_without_a_break_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(BEFORE + line_of(300).removesuffix("\n"))
    with pytest.raises(SourceError, match=r"a\.jsonl:2: the line has 299 bytes"):
        list(documents(str(path)))


def test_the_text_of_a_long_line_comes_in_chunks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(jsonl, "LONG_BYTES", 50)
    path = tmp_path / "a.jsonl"
    path.write_text(line_of(50) + line_of(51))
    short, long = (content for _, content in jsonl_file(path, "text"))
    assert isinstance(short, str)
    assert isinstance(long, WholeText)
    assert "".join(long.chunks()) == f"{short}x"
