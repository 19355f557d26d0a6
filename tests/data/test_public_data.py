# SPDX-License-Identifier: Apache-2.0
"""The `prepare` lines of docs/data.md write stores, with the hub replaced by two documents."""

import re
import shlex

import pytest

from data.store import Manifest
from recipes.ladders import LADDERS
from tests.house.rooms import TREE

PAGE = (TREE / "docs/data.md").read_text()
LINES = re.findall(r"`(longhaul prepare --source \w+=hf:[^`]*)`", PAGE)
NAMES = [re.search(r"--source (\w+)=", line).group(1) for line in LINES]


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_a_line_of_the_table_writes_a_store(line, answer, monkeypatch, tmp_path, tokenizer):
    asked = []

    def rows(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return [{"text": f"{n} words of {name}"} for n in range(60)]

    monkeypatch.setattr("datasets.load_dataset", rows)
    monkeypatch.chdir(tmp_path)
    tokenizer.save(tmp_path / "TOKENIZER")
    words = shlex.split(line)[1:]
    said = answer(*words)
    assert said.code == 0, said.err
    store = Manifest.load(tmp_path / words[words.index("--out") + 1])
    (source,) = store.sources
    dataset, _, config = source.origin.removeprefix("hf:").partition(":")
    assert set(asked) == {(dataset, config or None, "train", True)}
    assert store.train.documents + store.split("heldout").documents == 60
    assert f"{source.name}=hf:" in line


def test_the_table_has_the_sources_that_ladders_name_and_legal_text():
    assert {"fineweb", "fineweb_edu", "slimpajama", "caselaw"} <= set(NAMES)
    of_ladders = {
        share.source
        for ladder in LADDERS.values()
        for stage in ladder.stages
        for share in (stage.mix.shares if stage.mix else ())
    }
    assert of_ladders & set(NAMES) == {"fineweb", "fineweb_edu"}
