# SPDX-License-Identifier: Apache-2.0
"""The figures of a census equal counts by loops over documents."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.census import LengthTable, census, copies, curve_lengths
from data.prepare import prepare
from data.store import Manifest, StoreError
from data.token_files.megatron_index import IndexFileError, MegatronIndex, write_index


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    random = np.random.default_rng(0)
    return np.minimum(random.lognormal(3.5, 1.5, 600) + 1, 5_000).astype(np.int32)


def table_of(*arrays: Sequence[int]) -> LengthTable:
    return LengthTable.of([np.array(array, dtype=np.int32) for array in arrays])


def test_a_table_counts_lengths_below_and_above_what_is_counted(monkeypatch) -> None:
    monkeypatch.setattr("data.census.COUNTED", 100)
    monkeypatch.setattr("data.census.AT_ONCE", 3)
    arrays = [5, 5, 100, 99, 2**31 - 1, 100], [5, 1]
    table = table_of(*arrays)
    expected = Counter(arrays[0] + arrays[1])
    assert dict(zip(table.lengths.tolist(), table.counts.tolist(), strict=True)) == expected
    apart = LengthTable.together(table_of(array) for array in arrays)
    assert np.array_equal(apart.lengths, table.lengths)
    assert np.array_equal(apart.counts, table.counts)


def test_counts_are_those_of_a_loop(lengths) -> None:
    table = table_of(lengths)
    all_of = lengths.tolist()
    assert (table.documents, table.tokens, table.longest) == (600, sum(all_of), max(all_of))
    (tail,) = table.tails((64,))
    longer = [length for length in all_of if length > 64]
    assert (tail.documents, tail.tokens) == (len(longer), sum(longer))
    for bucket in table.buckets():
        first = bucket.at_least_tokens
        within = [length for length in all_of if first <= length < 2 * first]
        assert (bucket.documents, bucket.tokens) == (len(within), sum(within))
    assert abs(table.at_half(table.counts) - np.median(lengths)) <= 1
    middle = table.at_half(table.counts * table.lengths)
    assert sum(length for length in all_of if length < middle) < sum(all_of) / 2
    assert sum(length for length in all_of if length <= middle) >= sum(all_of) / 2


def test_cut_keeps_what_an_average_over_all_offsets_keeps(lengths) -> None:
    seq_length = 48
    kept = table_of(lengths).kept(seq_length)
    documents = tokens = 0.0
    for length in lengths.tolist():
        whole = sum(offset + length <= seq_length for offset in range(seq_length)) / seq_length
        documents += whole
        tokens += whole * length
    assert kept.cut_documents == pytest.approx(documents / 600, rel=1e-12)
    assert kept.cut_tokens == pytest.approx(tokens / lengths.sum(), rel=1e-12)
    fitting = lengths[lengths <= seq_length]
    assert kept.best_fit_documents == pytest.approx(len(fitting) / 600)
    assert kept.best_fit_tokens == pytest.approx(fitting.sum() / lengths.sum())


def test_padding_is_that_of_rows_packed_by_a_loop(lengths) -> None:
    seq_length = 256
    pieces = []
    for length in lengths.tolist():
        pieces += [seq_length] * (length // seq_length) + [length % seq_length]
    room: list[int] = []
    for piece in sorted((piece for piece in pieces if piece), reverse=True):
        fits = [row for row in range(len(room)) if room[row] >= piece]
        if fits:
            room[min(fits, key=room.__getitem__)] -= piece
        else:
            room.append(seq_length - piece)
    padding = sum(room) / (len(room) * seq_length)
    packed = table_of(lengths).packed(seq_length)
    assert (packed.documents, packed.padding) == (600, pytest.approx(padding))


def test_padding_of_many_documents_is_measured_on_some(monkeypatch, lengths) -> None:
    monkeypatch.setattr("data.census.PACKED", 300)
    table = table_of(lengths)
    packed = table.packed(256, seed=1)
    assert packed.documents == 300
    assert packed == table.packed(256, seed=1) != table.packed(256, seed=2)
    monkeypatch.undo()
    assert abs(packed.padding - table.packed(256).padding) < 0.05


def test_curves_end_where_every_document_fits() -> None:
    assert curve_lengths(3) == (2048,)
    assert curve_lengths(2049) == (2048, 4096)
    assert curve_lengths(10**9)[-1] == 2**20


def written(folder: Path, name: str, documents: Sequence[Sequence[int]]) -> MegatronIndex:
    """Write documents as a pair and return its index."""
    lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
    pointers = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    np.concatenate(documents).astype("<u2").tofile(folder / f"{name}.bin")
    write_index(folder / f"{name}.idx", np.dtype("<u2"), lengths, pointers)
    return MegatronIndex(folder / f"{name}.idx", np.dtype("<u2"), lengths, pointers)


def test_copies_are_counted_over_sources_and_splits(tmp_path) -> None:
    a, b, c, d = [1, 2, 0], [2, 1, 0], [7, 0], [9, 9, 9, 9, 0]
    first = written(tmp_path, "first", [a, b, a])
    second = written(tmp_path, "second", [a, d, c, c])
    heldout = written(tmp_path, "heldout", [d, [8, 0]])
    found = copies([first, second], [heldout])
    assert (found.documents, found.tokens) == (3, 3 + 3 + 2)
    assert found.largest_group_documents == 3
    assert found.heldout_documents_in_train == 1


def test_a_prepared_store_has_a_census(shared_store: Manifest) -> None:
    counted = census(shared_store)
    (source,) = counted.sources
    assert (source.documents, source.tokens) == (
        shared_store.train.documents,
        shared_store.train.tokens,
    )
    assert replace(source, name="all") == counted.together
    assert counted.copies is not None
    assert counted.copies.heldout_documents_in_train == 0
    only = census(shared_store, lengths_only=True)
    assert (only.sources, only.copies) == (counted.sources, None)


def test_an_index_that_is_not_the_manifest_s_is_refused(tmp_path, corpus) -> None:
    manifest = prepare(str(corpus), tmp_path / "store", vocab_size=300, heldout_fraction=0.2)
    (tmp_path / "store" / "train.idx").write_bytes(
        (tmp_path / "store" / "heldout.idx").read_bytes()
    )
    with pytest.raises(StoreError, match=r"train\.idx lists .* the manifest states"):
        census(manifest)


def test_a_document_outside_its_token_file_is_refused_by_the_name_of_the_index(
    tmp_path, corpus
) -> None:
    manifest = prepare(str(corpus), tmp_path / "store", vocab_size=300, heldout_fraction=0.2)
    index = tmp_path / "store" / "heldout.idx"
    documents = manifest.split("heldout").documents
    content = bytearray(index.read_bytes())
    content[34 + 4 * documents + 4] ^= 1
    index.write_bytes(content)
    with pytest.raises(IndexFileError, match=r"heldout\.idx is damaged: sequence 0 has .* tokens"):
        census(manifest)
