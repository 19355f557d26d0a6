# SPDX-License-Identifier: Apache-2.0
"""Documents, windows and prompts begin with the tokens that a tokenizer puts first."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.preparation import task
from data.prepare import prepare, write_plan
from data.store import Manifest, StoreError, require_rows, require_tokenizer, tokenizer_marker
from data.token_files.held_out import long_documents, with_first
from data.tokenization.encoder import Encoder
from data.tokenization.tokenizer import first_token_notes, load
from eval.answers.passkey import prompts
from eval.answers.tokens import text_encoder
from eval.loss.loss_by_position import windows
from eval.rope_search.scored_text import needle_texts, texts_past
from eval.ruler.tokens import Tokens
from longhaul.pages.store_page import show_store
from tests.data.conftest import folder_of

TEMPLATES = {
    "llama": ("<s> $A", ["<s>"]),
    "bert": ("[CLS] $A [SEP]", ["[CLS]"]),
    "two": ("[gMASK] <sop> $A", ["[gMASK]", "<sop>"]),
    "t5": ("$A </s>", []),
    "plain": (None, []),
}


@pytest.fixture(params=TEMPLATES)
def named(request, tokenizer, tmp_path) -> tuple[Path, list[int]]:
    template, first = TEMPLATES[request.param]
    folder = folder_of(tokenizer, tmp_path / "tokenizer", template)
    loaded = load(str(folder)).hugging_face
    return folder, [loaded.convert_tokens_to_ids(name) for name in first]


def documents(store: Manifest) -> list[list[int]]:
    splits = (long_documents(store, min_tokens=1, split=name) for name in ("train", "heldout"))
    return [text.tolist() for texts in splits for text in texts]


def test_documents_begin_with_it_long_ones_too(named, corpus, texts, tmp_path, monkeypatch, capsys):
    folder, first = named
    monkeypatch.setattr(task, "LONG_CHARS", 300)  # some are written through a file
    store = prepare(str(corpus), tmp_path / "store", tokenizer=str(folder), heldout_fraction=0.3)
    loaded = load(str(folder))
    eod = loaded.eod_id
    wanted = [[*first, *ids.tolist(), eod] for ids in loaded.encode_documents(texts)]
    assert sorted(documents(store)) == sorted(wanted)
    assert store.train.tokens + store.heldout.tokens == sum(map(len, wanted))
    found = Manifest.load(tmp_path / "store")
    assert found.tokenizer.first_ids == tuple(first)
    show_store(found)
    assert ("each document begins with" in capsys.readouterr().out) == bool(first)
    assert Tokens(loaded).prompt("a question")[: len(first)] == first


def test_what_comes_first_changes_no_identity_and_an_older_plan_is_read(tokenizer, tmp_path):
    encoder = load(str(folder_of(tokenizer, tmp_path / "tokenizer", "<s> $A")))
    assert replace(encoder, first_ids=()).sha256 == encoder.sha256
    encoder.write(tmp_path / "encoder.json")
    assert Encoder.load(tmp_path / "encoder.json").first_ids == encoder.first_ids
    older = json.loads((tmp_path / "encoder.json").read_text())
    del older["first_ids"]
    (tmp_path / "encoder.json").write_text(json.dumps(older))
    assert Encoder.load(tmp_path / "encoder.json").first_ids == ()


def test_a_tokenizer_whose_settings_changed_is_another_plan_s(tokenizer, corpus, tmp_path):
    folder = folder_of(tokenizer, tmp_path / "tokenizer", "<s> $A </s>")
    given = {"tokenizer": str(folder), "heldout_fraction": 0.3}
    first = write_plan(str(corpus), tmp_path / "store", **given)
    before = first.encoder.eod_id
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
    again = write_plan(str(corpus), tmp_path / "store", **given)
    assert again.encoder.eod_id != before


def test_it_can_be_left_out(tokenizer, corpus, tmp_path):
    folder = folder_of(tokenizer, tmp_path / "tokenizer", "<s> $A")
    given = {"tokenizer": str(folder), "heldout_fraction": 0.3}
    store = prepare(str(corpus), tmp_path / "without", first_token=False, **given)
    begun = prepare(str(corpus), tmp_path / "with", **given)
    assert (store.tokenizer.first_ids, store.first_tokens, begun.first_tokens) == ((), 0, 1)
    assert sorted(documents(store)) == sorted(ids[1:] for ids in documents(begun))
    assert list(first_token_notes(store)) == []


def test_an_older_store_is_told_of(tokenizer, corpus, tmp_path):
    folder = folder_of(tokenizer, tmp_path / "tokenizer", "<s> $A")
    store = prepare(str(corpus), tmp_path / "store", tokenizer=str(folder), heldout_fraction=0.3)
    assert list(first_token_notes(store)) == []
    content = json.loads((tmp_path / "store" / "manifest.json").read_text())
    for key in ("first_ids", "largest_id"):
        del content["tokenizer"][key]
    content.pop("sha256", None)
    older = replace(store, tokenizer=replace(store.tokenizer, first_ids=None, largest_id=None))
    older.write()
    read = Manifest.load(tmp_path / "store")
    assert (read.first_tokens, read.tokenizer.first_ids) == (0, None)
    [note] = first_token_notes(read)
    assert "puts <s> before a text" in note


def test_windows_and_prompts_begin_with_it(tokenizer, tmp_path):
    folder = folder_of(tokenizer, tmp_path / "tokenizer", "[gMASK] <sop> $A")
    encode, first = text_encoder(folder), list(load(str(folder)).first_ids)
    text = np.concatenate((first, np.arange(5, 395).repeat(5)))
    [window] = windows([text], 100, first=2)
    given = {"length": 400, "first": 2}
    made = prompts(encode, text, depth=0.5, trials=5, **given)
    hidden = needle_texts(encode, [text], **given)
    past = texts_past([text], after=60, **given)
    for read in (window, *(one.tokens for one in (*made, *hidden, *past))):
        assert read[:2].tolist() == first
        assert not set(first) & set(read[2:].tolist())
    assert [len(one.tokens) for one in (*made, *hidden, *past)] == [400] * 7
    assert len(window) == 101
    short = with_first(window, 101 - 40, 40, 2)
    assert short.tolist() == [*first, *window[-38:].tolist()]


def test_a_tokenizer_of_another_end_of_document_is_another_one(tokenizer, corpus, tmp_path):
    one = folder_of(tokenizer, tmp_path / "one", "<s> $A </s>", eos_token="<|endoftext|>")
    other = folder_of(tokenizer, tmp_path / "other", "<s> $A </s>", eos_token="</s>")
    store = prepare(str(corpus), tmp_path / "store", tokenizer=str(one), heldout_fraction=0.3)
    marker = tokenizer_marker(load(str(other)).save(tmp_path / "saved"))
    require_tokenizer(store, {"tokenizer": marker["tokenizer"]}, "an older checkpoint has")
    with pytest.raises(StoreError, match=r"the end-of-document token 0, not 40\d"):
        require_tokenizer(store, marker, "the import has")


def test_special_tokens_that_do_not_occur_need_no_rows(tokenizer, corpus, tmp_path):
    rows = tokenizer.vocab_size
    folder = folder_of(tokenizer, tmp_path / "padded", None, pad_token="[PAD]")
    store = prepare(str(corpus), tmp_path / "store", tokenizer=str(folder), heldout_fraction=0.3)
    assert store.tokenizer.vocab_size == rows + 1
    require_rows(store, rows)
    with pytest.raises(StoreError, match=f"token ids up to {rows - 1:,} and the model has"):
        require_rows(store, rows - 1)
    first = folder_of(tokenizer, tmp_path / "first", "<s> $A")
    begun = prepare(str(corpus), tmp_path / "begun", tokenizer=str(first), heldout_fraction=0.3)
    with pytest.raises(StoreError, match=f"token ids up to {rows:,} and the model has"):
        require_rows(begun, rows)
