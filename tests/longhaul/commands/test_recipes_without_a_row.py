# SPDX-License-Identifier: Apache-2.0
"""`longhaul recipes` of cards that no row is of: what can be done with them, and their table."""

import json

from longhaul.commands import recipes
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped import regenerate
from recipes.shipped.table import ROWS
from recipes.spec.suggest import did_you_mean
from recipes.spec.units import K


def lines_of(answer, *words: str) -> list[str]:
    code, out, err = answer(*words)
    assert code == 0, err
    return out.splitlines()


def test_a_card_without_a_row_is_found_with_the_command_that_trains_it(answer):
    lines = lines_of(answer, "recipes", "Qwen3")
    assert len(lines) == 7
    assert (
        "card qwen3_8b is on ladder qwen25_1m: longhaul pretrain --card qwen3_8b --ladder "
        "qwen25_1m --stage 64K"
    ) in lines
    (longer,) = lines_of(answer, "recipes", "qwen3_8b", "128K")
    assert longer.endswith("--stage 128K")


def test_a_card_without_a_row_is_found_as_json(answer):
    found = json.loads("\n".join(lines_of(answer, "recipes", "qwen3", "--json")))
    assert [one["card"] for one in found] == [name for name in CARDS if name.startswith("qwen3")]
    assert found[3] == {
        "card": "qwen3_8b", "ladder": "qwen25_1m", "stage": "64K", "seq_length": 64 * K,
        "command": "longhaul pretrain --card qwen3_8b --ladder qwen25_1m --stage 64K",
    }  # fmt: skip


def test_a_model_that_no_cluster_holds_is_told_what_says_why(answer, monkeypatch):
    monkeypatch.setattr(regenerate, "MOST_NODES", 4)
    said = answer("recipes", "llama31_405b", "fifteen_million").error()
    assert "no layout of llama31_405b fits up to 4 nodes of dgx_h100; `longhaul plan" in said


def test_cards_on_a_ladder_that_have_no_row_are_named_beside_those_that_have(answer):
    code, out, err = answer("recipes", "qwen25_1m", "256k")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "note: --card, --ladder and --stage also train qwen25_0p5b" in err
    assert err.rstrip().endswith("on qwen25_1m")


def test_every_card_and_ladder_is_found_by_its_name():
    listed = {(row.card.name, row.ladder.name) for row in ROWS.values()}
    for ladder in LADDERS.values():
        for card in ladder.cards:
            others = {
                (one.card.name, one.ladder.name) for one in recipes.unlisted([card, ladder.name])
            }
            assert {(card, ladder.name)} <= listed | others


def test_a_card_on_no_ladder_is_told_to_have_one_written(answer):
    said = answer("recipes", "gemma3").error()
    assert "no shipped ladder lists gemma3_270m or gemma3_1b; --card and --ladder train" in said
    written = "`longhaul ladders new gemma3_270m_64k.yaml --card gemma3_270m --seq 64K`"
    assert said.endswith(f"{written} writes one of your own")
    assert "no shipped ladder lists gemma3_1b" in answer("recipes", "gemma3_1b", "64K").error()
    assert "no shipped ladder" not in answer("recipes", "llama31_70b", "512K").error()


def test_a_ladder_of_one_s_own_is_called_so(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines_of(answer, "ladders", "new", "mine.yaml", "--card", "smollm2_135m", "--seq", "16K")
    own = ("--card", "smollm2_135m", "--ladder", "mine.yaml", "--stage", "16K", "--gpus", "1")
    shown = lines_of(answer, "show", *own)
    assert any(line.startswith("ladder ") and line.endswith(": your own") for line in shown)
    assert "data     the ladder does not say" in shown


def test_the_cards_in_a_table_with_their_ladders(answer):
    header, *lines = lines_of(answer, "recipes", "--cards")
    assert header.split() == ["card", "family", "weights", "native", "context", "ladders"]
    assert [line.split()[0] for line in lines] == list(CARDS)
    (row,) = (line for line in lines if line.startswith("qwen3_30b_a3b"))
    assert row.split() == ["qwen3_30b_a3b", "qwen3_moe", "30.5B", "32K", "qwen25_1m"]
    (found,) = json.loads(
        "\n".join(lines_of(answer, "recipes", "--cards", "llama31_70b", "--json"))
    )
    assert found == {
        "name": "llama31_70b", "family": "llama", "parameters": 70_553_706_496,
        "native_context": 128 * K, "hf_id": "meta-llama/Llama-3.1-70B",
        "pattern": None, "ladders": ["nemo", "ultralong_1m", "ultralong_2m", "ultralong_4m"],
    }  # fmt: skip


def test_a_name_that_is_near_none_is_told_what_lists_them(answer):
    said = answer("show", "zzzzzz").error()
    assert said.endswith(f"`longhaul recipes` lists the {len(ROWS)} there are")
    said = answer("plan", "zzzzzz", "--seq", "64K").error()
    assert said.endswith(f"`longhaul recipes --cards` lists the {len(CARDS)} there are")


def test_many_names_in_a_sentence_are_counted_and_few_are_named():
    names = [str(number) * 9 for number in range(20)]
    assert did_you_mean("x", names).endswith("111111111111111111 and 8 more")
    assert did_you_mean("x", names[:13]) == f"there are {', '.join(names[:13])}"
