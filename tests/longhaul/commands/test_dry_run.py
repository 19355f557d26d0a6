# SPDX-License-Identifier: Apache-2.0
"""A dry run is refused where the store or the start that it names is not there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.prepare import prepare


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("pretrain", "--factory", "tiny_512", "data.store=/nope"),
            "no token store at /nope; make",
        ),
        (
            ("pretrain", "--factory", "tiny_512", "--store", "nope"),
            "/nope; make it with `longhaul ",
        ),
        (
            ("pretrain", "--factory", "tiny_2k", "resume.start=/nope"),
            "tiny_2k cannot start: /nope holds no complete checkpoint to start from",
        ),
        (
            ("run", "--ladder", "nemo", "--card", "llama32_1b", "--gpus", "1", "--store", "nope"),
            "there is no token store at nope; make one: longhaul prepare",
        ),
    ],
)
def test_a_place_that_is_named_and_not_there_is_refused(answer, words, said):
    assert said in answer(*words, "--dryrun").error()


def test_the_usual_places_may_be_made_later_and_are_told(answer):
    done = answer("pretrain", "--factory", "tiny_2k", "--dryrun")
    assert done.code == 0, done.err
    assert f"# there is no token store at {Path('stores/tiny').absolute()}; make it" in done.out
    assert "# tiny_2k cannot start: " in done.out
    done = answer("run", "--ladder", "nemo", "--card", "llama32_1b", "--gpus", "1", "--dryrun")
    assert done.code == 0, done.err
    assert "# llama32_1b_nemo_16k cannot start: " in done.out


@pytest.mark.parametrize("command", ["pretrain", "run"])
def test_a_store_that_is_there_and_does_not_fit_is_refused(answer, tmp_path, command):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} words " * 99}) + "\n" for n in range(9)))
    store = prepare(str(texts), tmp_path / "store", vocab_size=300, heldout_fraction=0.4)
    what = ("--ladder", "tiny") if command == "run" else ("--factory", "tiny_512")
    words = (command, *what, "--store", str(store.root), "--dryrun")
    assert answer(*words).code == 0
    larger = replace(store, tokenizer=replace(store.tokenizer, largest_id=512))
    larger.write()
    assert "have token ids up to 512 and the model has 512 rows" in answer(*words).error()
