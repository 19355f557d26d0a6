# SPDX-License-Identifier: Apache-2.0
"""Where a chain's documents and tokenizer are, seen from a job."""

from dataclasses import replace

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
    found = documents_of(plan, ["books.jsonl"], "tokenizer")
    assert found.source == str(tmp_path.resolve() / "books.jsonl")
    assert found.tokenizer == str(tmp_path.resolve() / "tokenizer")
    mixed = documents_of(plan, ["synthetic:copy,filler=books.jsonl"], "tokenizer")
    assert f",filler={tmp_path.resolve() / 'books.jsonl'}," in str(mixed.sources)
    hub = documents_of(plan, ["hf:acme/books:clean@train"], None)
    assert (hub.source, hub.tokenizer) == ("hf:acme/books:clean@train", plan.card.hf_id)


def test_synthetic_documents_alone_need_a_tokenizer(plan):
    own = replace(plan, card=replace(plan.card, hf_id=None))
    for words in (["synthetic:copy"], ["a=synthetic:copy", "b=synthetic:retrieval"]):
        with pytest.raises(ValueError, match=r"synthetic:copy,.* has its length in tokens"):
            documents_of(own, words, None)
    assert documents_of(own, ["a=synthetic:copy", "b=hf:acme/books"], None).tokenizer is None
    assert documents_of(own, ["synthetic:copy"], "acme/tokenizer") is not None


@pytest.mark.parametrize(
    ("source", "tokenizer", "said"),
    [
        ("books", None, "--source books is not there"),
        ("synthetic:copy,filler=books", None, "the filler books of synthetic:.* is not there"),
        ("n=synthetic:copy,filler=/missing/x", None, "the filler /missing/x of .* is not there"),
        ("synthetic:copy,filler=repositories:books", None, "books does not name a folder"),
        ("repositories:books", None, "repositories:books does not name a folder"),
        ("hf:acme/books", "./tokenizer", "--tokenizer ./tokenizer is not there"),
        ("hf:acme/books", "/shared/a/tokenizer", "--tokenizer /shared/a/tokenizer is not there"),
    ],
)
def test_what_is_not_there_is_told(plan, source, tokenizer, said):
    with pytest.raises(ValueError, match=said):
        documents_of(plan, [source], tokenizer)
