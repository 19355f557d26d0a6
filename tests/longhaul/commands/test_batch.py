# SPDX-License-Identifier: Apache-2.0
"""`longhaul batch`; its arithmetic is held in tests/recipes/planner/test_batch_size.py."""

import pytest

ASKED = ("batch", "--seq", "64K", "--tokens-per-batch", "4M")


def test_a_batch_is_solved_for_its_accumulation(answer):
    code, out, err = answer(*ASKED, "--dp", 8, "--micro", 2)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "global batch  64 sequences of 65,536 tokens",
        "micro-batch   2",
        "accumulation  4",
        "DP            8",
        "tokens        4,194,304 a step",
    ]


def test_gpus_and_how_they_are_shared_give_the_data_ranks(answer):
    code, out, _ = answer(*ASKED, "--gpus", 64, "--tp", 2, "--cp", 4)
    assert code == 0
    assert "DP            8 (64 GPUs / (TP 2 x CP 4 x PP 1))" in out.splitlines()


def test_a_long_accumulation_is_noted(answer):
    code, out, err = answer(*ASKED, "--dp", 1)
    assert (code, "accumulation  64" in out) == (0, True)
    assert err.startswith("note: accumulation is 64, above 32")
    assert answer(*ASKED, "--dp", 2).err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("batch",), "any three of"),
        ((*ASKED, "--dp", 6), "nearest: 3,932,160 tokens (60 sequences, accumulation 10) or"),
        ((*ASKED, "--dp", 8, "--accumulation", 8), "leave one of them out"),
        (("batch", "--seq", "64X"), "--seq: a length is a number"),
        (("batch", "--seq", "64K", "--tokens-per-batch", "4T"), "--tokens-per-batch: a length is"),
        ((*ASKED, "--dp", 8, "--gpus", 8), "--gpus and --dp exclude each other"),
        ((*ASKED, "--dp", 8, "--tp", 2), "--tp, --cp and --pp divide --gpus"),
        ((*ASKED, "--gpus", 12, "--cp", 8), "take 8 or 16"),
        ((*ASKED, "--dp", -1), "DP is -1; it must be at least 1"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(answer, words, said):
    assert said in answer(*words).error()
