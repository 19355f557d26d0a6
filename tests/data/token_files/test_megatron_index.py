# SPDX-License-Identifier: Apache-2.0
"""An index that is written in pieces is what Megatron writes and reads."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import _IndexReader, _IndexWriter

from data.token_files import megatron_index
from data.token_files.megatron_index import IndexWriter


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_an_index_written_in_pieces_is_megatron_s_own_byte_for_byte(
    tmp_path: Path, monkeypatch, dtype
) -> None:
    monkeypatch.setattr(megatron_index, "DOCUMENTS_AT_ONCE", 4)
    lengths = np.random.default_rng(1).integers(1, 50, size=23).astype(np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    with _IndexWriter(str(tmp_path / "theirs"), dtype) as theirs:
        theirs.write(lengths, None, range(len(lengths) + 1))
    with IndexWriter(tmp_path / "ours", np.dtype(dtype), len(lengths)) as ours:
        for some in (slice(0, 9), slice(9, 10), slice(10, None)):
            ours.add(lengths[some], pointers[some])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert _IndexReader(str(tmp_path / "ours"), multimodal=False).sequence_count == 23


def test_an_index_of_fewer_documents_than_its_header_says_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="2 documents of 3"),
        IndexWriter(tmp_path / "a.idx", np.dtype("u2"), 3) as index,
    ):
        index.add(np.ones(2, np.int32), np.zeros(2, np.int64))
