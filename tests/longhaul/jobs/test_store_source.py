# SPDX-License-Identifier: Apache-2.0
"""Where a chain's documents and tokenizer are, seen from a job."""

import pytest

from longhaul.jobs import ladder_run
from longhaul.jobs.store_source import documents_of
from recipes.ladders import LADDERS
from recipes.models import CARDS


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return ladder_run.plan(
        LADDERS["ultralong_1m"], CARDS["llama31_8b"], tmp_path / "run", tmp_path / "store"
    )


def test_places_are_absolute_and_names_of_the_hub_stay(plan, tmp_path):
    (tmp_path / "books.jsonl").touch()
    (tmp_path / "tokenizer").mkdir()
    found = documents_of(plan, "books.jsonl", "tokenizer")
    assert found.source == str(tmp_path.resolve() / "books.jsonl")
    assert found.tokenizer == str(tmp_path.resolve() / "tokenizer")
    hub = documents_of(plan, "hf:acme/books:clean@train", None)
    assert (hub.source, hub.tokenizer) == ("hf:acme/books:clean@train", plan.card.hf_id)


@pytest.mark.parametrize(
    ("source", "tokenizer", "said"),
    [
        ("books", None, "--source books is not there"),
        ("hf:acme/books", "./tokenizer", "--tokenizer ./tokenizer is not there"),
        ("hf:acme/books", "/shared/a/tokenizer", "--tokenizer /shared/a/tokenizer is not there"),
    ],
)
def test_what_is_not_there_is_told(plan, source, tokenizer, said):
    with pytest.raises(ValueError, match=said):
        documents_of(plan, source, tokenizer)
