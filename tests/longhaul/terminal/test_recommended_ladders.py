# SPDX-License-Identifier: Apache-2.0
"""Ladders that pages recommend for a card and a length, and the commands that precede them."""

import json
import shlex
from pathlib import Path

import pytest

from tests.longhaul.terminal.test_next_commands import trained_by, words_of


def test_the_plan_and_the_list_name_the_same_ladder_for_a_length(answer):
    command = "longhaul pretrain --card qwen25_7b --ladder prolong --stage 512K"
    assert command in answer("plan", "qwen25_7b", "--seq", "512K").out
    assert command in answer("recipes", "qwen25_7b", "512k").error()


def test_a_ladder_whose_rotation_does_not_suit_is_not_recommended_for_a_length(answer):
    command = "longhaul ladders new llama31_8b_512k.yaml --card llama31_8b --seq 512K"
    assert command in answer("plan", "llama31_8b", "--seq", "512K").out
    listed = answer("recipes", "llama31_8b", "512k").error()
    assert f"`{command}`" in listed
    assert "takes away the scaling" in answer("recipes", "llama31_8b", "prolong").error()
    code, _, err = answer(*shlex.split(command)[1:])
    assert code == 0, err


def test_the_json_of_a_plan_has_the_commands_of_its_page(answer):
    for asked in (("plan", "llama31_8b", "--seq", "512K"), ("plan", "qwen25_7b", "--seq", "64K")):
        found, page = json.loads(answer(*asked, "--json").out), answer(*asked).out
        lines = [shlex.split(line) for line in (*found["first"], found["command"])]
        assert lines == words_of(page)


def test_a_length_within_the_card_s_context_is_not_recommended(answer):
    listed = answer("recipes", "llama31_8b", "48k").error()
    assert "llama31_8b was trained for 131,072 tokens; name more" in listed
    assert "`longhaul" in answer("recipes", "llama31_8b", "llama31", "48k").error()


def test_what_a_ladder_reads_is_made_first_where_it_is_not_there(answer):
    asked = ("plan", "llama31_8b", "--seq", "64K")
    first = words_of(answer(*asked).out.partition("train it")[0])
    assert [words[1] for words in first] == ["import", "prepare"]
    assert first[1][-1] == "stores/llama31_8b"
    Path("models/llama31_8b").mkdir(parents=True)
    (left,) = words_of(answer(*asked).out.partition("train it")[0])
    assert left == first[1]
    Path("stores/llama31_8b").mkdir(parents=True)
    assert "first," not in answer(*asked).out
    assert "first," not in answer("plan", "tiny", "--seq", "8K", "--gpus", "1").out


@pytest.mark.parametrize(("length", "tokens"), [("80K", 81920), ("100000", 100_000)])
def test_a_length_that_no_ladder_has_leads_to_a_ladder_of_one_s_own(answer, length, tokens):
    new, train = trained_by(answer("plan", "qwen25_7b", "--seq", length, "--nodes", "1").out)
    code, _, err = answer(*new[1:])
    assert code == 0, err
    code, out, err = answer(*train[1:], "--dryrun")
    assert code == 0, err
    assert f"seq_length: {tokens}\n" in out


def test_the_page_of_a_user_s_ladder_leads_back_to_that_ladder(answer):
    new, _ = trained_by(answer("plan", "qwen25_7b", "--seq", "80K", "--nodes", "1").out)
    assert answer(*new[1:]).code == 0
    shown = answer("show", "--card", "qwen25_7b", "--ladder", new[3]).out
    planned = next(words for words in words_of(shown) if words[1] == "plan")
    assert planned[2:5] == ["qwen25_7b", "--ladder", new[3]]
    assert answer(*planned[1:]).code == 0


def test_the_page_of_a_ladder_of_several_stages_leads_back_to_it(answer):
    assert answer("ladders", "new", "mine.yaml").code == 0
    asked = ("show", "--card", "llama3_8b", "--ladder", "mine.yaml", "--stage", "64K")
    planned = next(words for words in words_of(answer(*asked).out) if words[1] == "plan")
    assert planned[2:5] == ["llama3_8b", "--ladder", "mine.yaml"]
    assert answer(*planned[1:]).code == 0


def test_a_small_budget_gets_a_batch_that_it_can_pay_for(answer):
    new = ("ladders", "new", "small.yaml", "--card", "llama3_8b", "--seq", "64K")
    assert answer(*new, "--tokens", "1M").code == 0
    code, _, said = answer("ladders", "check", "small.yaml", "--card", "llama3_8b")
    assert code == 0
    assert "models/llama3_8b is not there yet: longhaul import --from meta-llama/" in said
    assert "for random weights state `start: scratch` of that stage" in said


def test_a_length_below_the_card_s_context_has_no_command(answer):
    out = answer("plan", "llama31_8b", "--seq", "80K", "--nodes", "1").out
    assert words_of(out) == []
    assert "llama31_8b was trained for 131,072 tokens" in out
