# SPDX-License-Identifier: Apache-2.0
"""A stage of a run by its name or its length."""

import pytest

from eval.run_folder import write_json
from longhaul.run_folder.stage_named import stage_named
from recipes.spec.naming import stage_folder

LENGTHS = {"tiny_512": (512, None), "tiny_2k": (2048, None), "skips_2k": (2048, 8192)}


@pytest.fixture
def run(tmp_path):
    for name, (length, target) in LENGTHS.items():
        record = {"name": name, "seq_length": length, "target_length": target}
        write_json(stage_folder(tmp_path, name) / "stage.json", record)
    return tmp_path


@pytest.mark.parametrize(
    ("word", "name"),
    [("tiny_2k", "tiny_2k"), ("512", "tiny_512"), ("8K", "skips_2k"), ("8,192", "skips_2k")],
)
def test_a_stage_is_taken_by_its_name_and_by_a_length_that_only_it_has(run, word, name):
    assert stage_named(run, word, list(LENGTHS)) == name


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("2K", "has 2 stages of 2K: tiny_2k, skips_2k; name one"),
        ("4K", "has no stage of 4K; it has tiny_512, tiny_2k, skips_2k"),
        ("tiny_2kk", "has no stage 'tiny_2kk'; did you mean tiny_2k"),
    ],
)
def test_another_word_is_refused_with_what_there_is(run, word, said):
    with pytest.raises(ValueError, match=said):
        stage_named(run, word, list(LENGTHS))


def test_a_run_without_stages_says_that_it_has_none(tmp_path):
    with pytest.raises(ValueError, match="has no stage 512; it has none yet"):
        stage_named(tmp_path, "512", [])
