# SPDX-License-Identifier: Apache-2.0
"""A store of foreign files says what their documents begin with."""

import pytest

from data.tokenization.tokenizer import load
from tests.data.adoption.conftest import write_pair
from tests.data.conftest import folder_of


@pytest.mark.parametrize(
    ("begun", "kept"), [(1.0, True), (0.9, False), (0.0, False)], ids=["all", "most", "none"]
)
def test_an_adopted_store_says_what_all_documents_begin_with(
    begun, kept, tokenizer, encoded, tmp_path, adopted, capsys
):
    folder = folder_of(tokenizer, tmp_path / "tokenizer", "<s> $A")
    first = list(load(str(folder)).first_ids)
    some = round(begun * len(encoded))
    ids = [[[*(first if at < some else []), *one]] for at, one in enumerate(encoded)]
    store = adopted(write_pair(tmp_path / "files" / "web", ids), tokenizer=str(folder))
    assert store.tokenizer.first_ids == (tuple(first) if kept else ())
    said = f"{some:,} of the {len(ids):,} documents begin with it" in capsys.readouterr().err
    assert said != kept
