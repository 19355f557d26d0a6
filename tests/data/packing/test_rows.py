# SPDX-License-Identifier: Apache-2.0
"""Packed rows on disk: every token once, no short document cut, the same rows again."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data.packing import rows as packing
from data.packing.rows import Request, RowError, Rows, packed

REQUEST = Request(
    lengths_sha256="0" * 64, at_least=1, below=None, row_length=64, packing="best_fit",
    documents_per_row=None, overlap=0, seed=1,
)  # fmt: skip


@pytest.fixture
def lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 200, size=500).astype(np.int32)


def pieces_of(rows: Rows) -> list[list[tuple[int, int, int]]]:
    return [
        list(zip(*(column.tolist() for column in rows.row(number)), strict=True))
        for number in range(rows.rows)
    ]


@pytest.mark.parametrize("window", [2**20, 37])
@pytest.mark.parametrize("kind", ["best_fit", "cut"])
def test_every_token_is_in_one_row(
    tmp_path: Path, lengths: np.ndarray, monkeypatch: pytest.MonkeyPatch, kind: str, window: int
) -> None:
    monkeypatch.setattr(packing, "WINDOW", window)
    rows = packed(tmp_path, replace(REQUEST, packing=kind), lengths)
    seen = [np.zeros(length, int) for length in lengths]
    for row in pieces_of(rows):
        assert sum(length for _, _, length in row) <= 64
        for document, offset, length in row:
            seen[document][offset : offset + length] += 1
    counted = np.concatenate(seen)
    assert counted.max() == 1
    assert counted.min() == 1
    assert rows.tokens == counted.sum()
    assert rows.filled == pytest.approx(rows.tokens / (64 * rows.rows))


def test_only_documents_longer_than_a_row_are_cut(tmp_path: Path, lengths: np.ndarray) -> None:
    rows = packed(tmp_path, REQUEST, lengths)
    for row in pieces_of(rows):
        for document, offset, length in row:
            if lengths[document] <= 64:
                assert (offset, length) == (0, lengths[document])
    assert rows.cuts == sum((length - 1) // 64 for length in lengths.tolist())


def test_pieces_of_a_long_document_overlap_as_asked(tmp_path: Path) -> None:
    rows = packed(tmp_path, replace(REQUEST, overlap=16), np.array([150, 64, 65]))
    pieces = sorted(piece for row in pieces_of(rows) for piece in row)
    assert pieces == [(0, 0, 64), (0, 48, 64), (0, 96, 54), (1, 0, 64), (2, 0, 64), (2, 48, 17)]


def test_cut_rows_are_the_documents_end_to_end(tmp_path: Path, lengths: np.ndarray) -> None:
    rows = packed(tmp_path, replace(REQUEST, packing="cut"), lengths)
    joined = [piece for row in pieces_of(rows) for piece in row]
    for before, after in pairwise(joined):
        ends = before[1] + before[2] == lengths[before[0]]
        assert after[1] == 0 if ends else after[:2] == (before[0], before[1] + before[2])


def test_bounds_on_lengths_and_documents_hold(tmp_path: Path, lengths: np.ndarray) -> None:
    rows = packed(tmp_path, replace(REQUEST, at_least=8, below=32, documents_per_row=2), lengths)
    pieces = pieces_of(rows)
    assert max(map(len, pieces)) == 2 == rows.most_pieces
    documents = {document for row in pieces for document, _, _ in row}
    assert documents == set(np.flatnonzero((lengths >= 8) & (lengths < 32)).tolist())


def test_work_is_the_sum_of_squares_with_padding(tmp_path: Path, lengths: np.ndarray) -> None:
    rows = packed(tmp_path, REQUEST, lengths)
    for number, row in enumerate(pieces_of(rows)):
        sizes = [length for _, _, length in row]
        padding = 64 - sum(sizes)
        assert rows.work[number] == sum(size**2 for size in sizes) + padding**2


def test_rows_are_packed_once(tmp_path: Path, lengths: np.ndarray) -> None:
    first = packed(tmp_path, REQUEST, lengths)
    again = packed(tmp_path, REQUEST, np.empty(0, np.int32))  # would be an error if it were packed
    assert pieces_of(again) == pieces_of(first)
    other = packed(tmp_path, replace(REQUEST, seed=2), lengths)
    assert pieces_of(other) != pieces_of(first)
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_that_cannot_be_written_are_refused_in_a_sentence(
    tmp_path: Path, lengths: np.ndarray
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RowError, match=r"cannot be packed in \S+/file/index \(not a directory\)"):
        packed(tmp_path / "file" / "index", REQUEST, lengths)


def test_ranges_of_hashes_divide_the_documents(tmp_path: Path, lengths: np.ndarray) -> None:
    seen: list[int] = []
    for between in ((0.0, 0.3), (0.3, 1.0)):
        rows = packed(tmp_path, replace(REQUEST, between=between), lengths)
        found = {document for row in pieces_of(rows) for document, _, _ in row}
        assert len(found) / lengths.size == pytest.approx(between[1] - between[0], abs=0.1)
        seen += found
    assert sorted(seen) == list(range(lengths.size))


def test_rare_documents_are_packed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "WINDOW", 8)
    lengths = np.where(np.arange(64) % 8 == 0, 30, 2)
    rows = packed(tmp_path, replace(REQUEST, at_least=16), lengths)
    assert rows.rows == 4


def test_a_group_without_documents_is_refused(tmp_path: Path, lengths: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no document has at least 256 tokens"):
        packed(tmp_path, replace(REQUEST, at_least=256), lengths)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["documents", "starts", "index.json"])
def test_a_damaged_index_says_what_to_do(tmp_path: Path, lengths: np.ndarray, name: str) -> None:
    packed(tmp_path, REQUEST, lengths)
    (folder,) = tmp_path.iterdir()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2 // 8 * 8])
    with pytest.raises(RowError, match="remove the folder, and they are packed again"):
        packed(tmp_path, REQUEST, lengths)


def test_rows_that_name_objects_instead_of_numbers_are_refused(
    tmp_path: Path, lengths: np.ndarray
) -> None:
    packed(tmp_path, REQUEST, lengths)
    (folder,) = tmp_path.iterdir()
    facts = json.loads((folder / "index.json").read_text())
    facts["types"]["starts"] = "|O"  # of 8 bytes too: NumPy would follow them as pointers
    (folder / "index.json").write_text(json.dumps(facts))
    with pytest.raises(RowError, match=r"starts is of type \|O instead of numbers"):
        packed(tmp_path, REQUEST, lengths)
