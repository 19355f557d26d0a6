# SPDX-License-Identifier: Apache-2.0
"""A line that is read in chunks is the line that Python's JSON parser reads as a whole."""

import json
import random
from pathlib import Path

import pytest

from data.formats import jsonl, long_line
from data.formats.jsonl import jsonl_file, text_of_line
from data.formats.records import Unusable, UnusableError

ALPHABET = ["a", " ", "\n", '"', "\\", "\u00fc", "\u4e2d", "\U0001f600", "\t", "\x01", "/", "u"]


@pytest.fixture(params=[1, 2, 3, 7, 64])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read every line in chunks of a few bytes."""
    monkeypatch.setattr(jsonl, "LONG_BYTES", 8)
    monkeypatch.setattr(long_line, "BLOCK_BYTES", request.param)
    return int(request.param)


def read(path: Path) -> list[str | Unusable]:
    """Return the texts of a file, or their problems."""
    found: list[str | Unusable] = []
    for _, content in jsonl_file(path, "text"):
        if isinstance(content, str | Unusable):
            found.append(content)
            continue
        try:
            text = "".join(content.chunks())
            text.encode()
            found.append(text)
        except UnusableError as error:
            found.append(error.found)
        except UnicodeEncodeError:
            found.append(Unusable("broken", "surrogate"))
    return found


def test_texts_of_all_characters_are_read_as_they_were_written(tmp_path: Path, block: int) -> None:
    draw = random.Random(block)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randrange(60))) for _ in range(60)]
    lines = []
    for number, text in enumerate(texts):
        other = {"id": number, "more": [{"text": "no"}, {'te"xt\\': ["{", 1.5, None]}]}
        record = {"text": text, **other} if number % 2 else {**other, "text": text}
        lines.append(json.dumps(record, ensure_ascii=bool(number % 3)))
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read(path) == texts


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "open',
        b'{"text": "ends in an escape\\',
        b'{"text": "bad \\x escape"}',
        b'{"text": "bad \\u12g4 escape"}',
        b'{"text": "half \\ud83d of a pair"}',
        b'{"text": "two low \\ude00\\ude00"}',
        b'{"text": "a control \x01 character"}',
        b'{"text": "not UTF-8 \xff"}',
        b'{"text": "ends too early", ',
        b'{"text": "more follows"} x',
        b'{"text": 123456789}',
        b'{"text": ["a string in an array"]}',
        b'{"inner": {"text": "deeper"}}',
        b'["text", "an array of strings"]',
        b'"text as a string"',
        b'{"text" "no colon"}',
        b"[[[[[[[[[[[[",
        b'{"a": "\\ud800", "text": 1}',
    ],
    ids=repr,
)
def test_a_line_is_broken_exactly_if_the_whole_is(tmp_path: Path, block: int, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before it"}\n' + line + b'\n{"text": "after it"}\n')
    before, found, after = read(path)
    assert (before, after) == ("before it", "after it")
    assert isinstance(found, Unusable)
    assert found.reason == "broken"
    whole = text_of_line(line, "text")
    assert isinstance(whole, Unusable) or "\\ud" in line.decode("latin-1")


def test_the_byte_that_is_not_utf8_is_named(tmp_path: Path, block: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + "\u4e2d".encode() * 30 + b'\xe4\xb8"}\n')
    (found,) = read(path)
    assert found == Unusable("broken", "invalid UTF-8 at byte 100 of the line")


def test_a_second_text_field_of_a_long_line_is_refused(tmp_path: Path, block: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "first", "text": "second"}\n')
    assert read(path) == [Unusable("broken", "the field 'text' is there twice")]
