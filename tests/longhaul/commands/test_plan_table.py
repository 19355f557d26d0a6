# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan` of several lengths and numbers of GPUs: a line for each, or JSON."""

import json

import pytest

from recipes.spec.units import K

SEVERAL = ("plan", "llama31_70b", "--seq", "128K,512K,1M", "--nodes", "1,4")


def test_every_point_is_the_plan_of_that_length_and_number_of_gpus(answer):
    code, shown, said = answer(*SEVERAL, "--json", "--tokens", "2B")
    assert code == 0, said
    points = json.loads(shown)["points"]
    asked = [(one["seq_length"], one["gpus"]) for one in points]
    assert asked == [(length * K, gpus) for length in (128, 512, 1024) for gpus in (8, 32)]
    assert {one["fits"] for one in points} == {True, False}
    for one in points:
        if not one.pop("fits"):
            assert "layout" not in one
            continue
        size = ("--seq", one.pop("seq_length"), "--gpus", one.pop("gpus"))
        alone = json.loads(answer("plan", "llama31_70b", *size, "--tokens", "2B", "--json").out)
        assert one.pop("tokens_per_batch") == alone["tokens_per_batch"]
        assert one == alone["plans"][0]


def test_the_table_has_a_line_for_each_and_says_what_does_not_fit(answer, monkeypatch):
    lines = [line for line in answer(*SEVERAL).out.splitlines() if line.startswith("│")]
    assert len(lines) == 6
    [unfit] = [line for line in lines if "does not fit" in line]
    assert unfit.split("│")[1:3] == ["   1M ", "    8 "]
    assert "adam-on-host:0.9 (not proven) │" in lines[0]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = answer(*SEVERAL).out
    assert all(word in narrow for word in ("head_chunked1", "offload-both:80.8", "not fit"))


def test_small_figures_have_digits(answer):
    shown = answer("plan", "tiny", "--seq", "512,1K", "--tokens", "1M").out
    row = next(line for line in shown.splitlines() if line.startswith("│"))
    days, hours, cost = map(float, row.split("│")[8:11])
    assert days > 0
    assert hours == pytest.approx(days * 8 * 24, rel=0.01)
    assert cost > 0


def test_a_length_with_a_comma_is_one_length(answer):
    found = json.loads(answer("plan", "llama31_8b", "--seq", "131,072", "--json").out)
    assert found["seq_length"] == 128 * K


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seq", "64K,64Q"), "--seq: a length is a number, with K or M"),
        (("--seq", "64K", "--gpus", "8,12"), "--gpus is 12, not a whole number of nodes of 8"),
        (("--seq", "64K,1M", "--layout", "dp8"), "--layout cannot go with several lengths"),
        (("--seq", "64K,1M", "--plot", "x.png"), "--plot cannot go with several lengths"),
        (("--seq", "64K,1M", "--why"), "--why cannot go with several lengths"),
        (("--max-seq", "--nodes", "1,2"), "several numbers of GPUs cannot go with --max-seq"),
        (("--ladder", "prolong", "--nodes", "1,2"), "1,2 are several sizes"),
    ],
)
def test_what_several_points_cannot_have_is_refused(answer, words, said):
    assert said in answer("plan", "llama31_8b", *words).error()


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("1,0", "'--nodes': 0 is not in the range"),
        ("1,,2", "'--nodes': '' is not a valid number"),
        ("1:4", "'1:4' is not a valid number; expected one"),
    ],
)
def test_each_number_is_an_integer_from_one_on(answer, nodes, said):
    code, _, shown = answer("plan", "llama31_8b", "--seq", "64K", "--nodes", nodes)
    assert code == 2
    assert said in shown
