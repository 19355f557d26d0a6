# SPDX-License-Identifier: Apache-2.0
import json
import re
from dataclasses import replace

from benchmarks.tiny_retrieval import TIMES, mixed_store
from data.store import Manifest
from data.token_files.held_out import long_documents
from data.tokenization.tokenizer import train
from recipes.ladders.tiny import TINY_LADDER
from tests.house.rooms import TREE


def test_a_mix_has_the_share_of_tokens_of_synthetic_documents_that_is_asked_for(tmp_path):
    texts = [file.read_text() for file in sorted((TREE / "data").rglob("*.py"))]
    tokenizer = train(texts, 512)
    tokenizer.save(tmp_path / "text" / "tokenizer")
    (tmp_path / "filler.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "mix").mkdir()
    stage = replace(TINY_LADDER.stages[0], tokens=16 * 1024)
    store = Manifest.load(mixed_store(stage, 0.25, ["retrieval"], tmp_path / "mix", tokenizer))
    stored = [
        tokenizer.backend.decode(tokens[:-1].tolist())
        for split in ("train", "heldout")
        for tokens in long_documents(store, min_tokens=1, split=split)
    ]
    synthetic = [t for t in stored if len(re.findall(r"^assert [A-Z]+ == \d{5}$", t, re.M)) == 4]
    tokens = sum(tokenizer.count(text) + 1 for text in synthetic)
    asked = 0.25 * TIMES * stage.tokens
    assert asked <= tokens < asked + 256
    assert all(tokenizer.count(text) < 256 for text in synthetic)
    assert store.train.tokens + store.heldout.tokens >= TIMES * stage.tokens
