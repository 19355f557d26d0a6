# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import replace

import pytest

from benchmarks.tiny_retrieval import TIMES, mixed_ladder, mixed_store, synthetic
from data.store import Manifest
from data.token_files.held_out import long_documents
from data.tokenization.tokenizer import train
from recipes.ladders.tiny import TINY_LADDER
from recipes.models import TINY
from recipes.notation import ladder_file
from tests.house.rooms import TREE


def test_the_mixed_store_has_enough_retrieval_documents_of_a_row_at_most(tmp_path):
    texts = [file.read_text() for file in sorted((TREE / "data").rglob("*.py"))]
    tokenizer = train(texts, 512)
    tokenizer.save(tmp_path / "text" / "tokenizer")
    stage = replace(TINY_LADDER.stages[0], tokens=64 * 1024)
    store = Manifest.load(mixed_store(iter(texts), 0.25, [stage], tmp_path))
    stored = [
        tokenizer.backend.decode(tokens[:-1].tolist())
        for split in ("train", "heldout")
        for tokens in long_documents(store, min_tokens=1, split=split)
    ]
    made = [t for t in stored if len(re.findall(r"^assert [A-Z]+ == \d{5}$", t, re.M)) == 4]
    tokens = sum(tokenizer.count(text) + 1 for text in made)
    asked = 0.25 * TIMES * stage.tokens
    assert 0.9 * asked < tokens < 1.2 * asked
    assert all(tokenizer.count(text) < stage.seq_length for text in made)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_mixed_ladder_is_the_tiny_one_but_for_its_rows(share, tmp_path):
    read = ladder_file.read(mixed_ladder(share, tmp_path), TINY)
    for stage, present in zip(read.stages, TINY_LADDER.stages, strict=True):
        assert replace(stage, mix=None, documents="across") == present
        weights = {each.source: each.weight for each in stage.mix.shares}
        assert weights.get(synthetic(present), 0) == share
        assert stage.mix.packing == "best_fit"
