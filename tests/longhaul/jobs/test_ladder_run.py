# SPDX-License-Identifier: Apache-2.0
"""What `longhaul run` decides before anything large is loaded."""

from pathlib import Path

import pytest

from eval.run_folder import write_json
from longhaul.jobs import ladder_run
from recipes.checkpoints.marker import ORIGIN, origin_of, write_marker
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.notation import ladder_file
from recipes.shipped.table import ROWS
from tests.recipes.hugging_face.support.models import CONFIGS


def test_every_card_of_a_ladder_has_a_recipe_for_each_stage_and_no_recipe_is_left_over():
    from recipes.shipped.factories import FACTORIES

    plans = [
        ladder_run.plan(*ladder_run.choose(row.ladder.name, row.card.name), None, None)
        for row in ROWS.values()
    ]
    first = {name for name in FACTORIES if not ROWS[name].variant}
    assert {name for plan in plans for name in plan.stage_names} == first


def test_the_only_card_of_a_ladder_needs_no_naming():
    ladder, card = ladder_run.choose("tiny", None)
    assert (ladder.name, card.name) == ("tiny", "tiny")


def test_the_only_card_of_a_file_completes_its_rotations(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("cards: [llama3_8b]\n" + ladder_file.template(path))
    ladder, card = ladder_run.choose(str(path), None)
    assert card is CARDS["llama3_8b"]
    assert ladder.stages[0].rope.base == card.native_rope.base


def test_weights_of_another_folder_of_the_same_name_are_not_trained(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    first, second = (tmp_path / parent / "small" for parent in ("a", "b"))
    for folder in (first, second):
        CONFIGS["llama"].save_pretrained(folder)
    facts = {"step": 0, "max_steps": 0, "tokenizer": "t", ORIGIN: origin_of("a/small")}
    write_marker(tmp_path / "models" / "small", facts)
    _, card = ladder_run.choose("yarn", "a/small")
    assert card.path == "a/small"
    with pytest.raises(ValueError, match="to train what it has use --card models/small") as told:
        ladder_run.choose("yarn", "b/small")
    assert "longhaul import --from b/small --to models/OTHER_NAME" in str(told.value)
    asked = ("pretrain", "--card", "b/small", "--ladder", "yarn", "--stage", "64K")
    assert "models/small was imported from" in answer(*asked, "--device", "cpu").error()


def test_a_ladder_of_several_cards_asks_for_one():
    with pytest.raises(ValueError, match="--card llama3_8b"):
        ladder_run.choose("nemo", None)


def test_a_card_that_the_ladder_was_not_made_for_is_taken_with_a_note(capsys):
    ladder, card = ladder_run.choose("prolong", "llama31_8b")
    assert (ladder, card) == (LADDERS["prolong"], CARDS["llama31_8b"])
    said = capsys.readouterr().err
    assert "note: ladder prolong is for llama3_8b; its rotations were not chosen" in said
    assert "takes away the scaling that llama31_8b was trained with" in said


def test_a_published_card_without_a_store_is_told_how_to_make_one(tmp_path):
    plan = ladder_run.plan(LADDERS["nemo"], CARDS["llama32_1b"], None, tmp_path / "none")
    with pytest.raises(ValueError, match=r"longhaul prepare .* meta-llama/Llama-3.2-1B"):
        ladder_run.make_missing_store(plan)


def test_places_named_on_the_command_line_win_over_convention():
    plan = ladder_run.plan(LADDERS["tiny"], CARDS["tiny"], Path("here"), Path("there"))
    assert (plan.run, plan.store) == (Path("here"), Path("there"))


def test_a_run_folder_of_another_card_is_refused(tmp_path):
    write_json(tmp_path / "run.json", {"ladder": "nemo", "card": "llama3_8b", "stages": []})
    own, other = (
        ladder_run.plan(LADDERS["nemo"], CARDS[name], tmp_path, None)
        for name in ("llama3_8b", "qwen25_7b")
    )
    ladder_run.require_own_folder(own)
    with pytest.raises(ValueError, match="is a run of the card llama3_8b, not of qwen25_7b"):
        ladder_run.require_own_folder(other)
