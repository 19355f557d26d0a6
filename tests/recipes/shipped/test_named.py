# SPDX-License-Identifier: Apache-2.0
"""Cards and ladders by the words of a command: shipped names, folders, files, names on the hub."""

import shutil
from pathlib import Path

import pytest

from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.notation import ladder_file
from recipes.shipped.named import card_named, cards_of, combined, ladder_named
from recipes.spec.naming import start_folder
from tests.recipes.hugging_face.support.models import CONFIGS, CONTEXT


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """Return the folder of a small model, of which a card needs only the config."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "My Model-1"
    folder.mkdir()
    CONFIGS["llama"].save_pretrained(folder)
    return folder


def imported(model: Path) -> Path:
    folder = model.parent / "an import"
    shutil.copytree(model, folder / "hugging_face")
    return folder


def test_a_shipped_name_is_a_shipped_card():
    assert card_named("llama31_8b") is CARDS["llama31_8b"]
    assert CARDS["llama31_8b"].word == "llama31_8b"


def test_a_hugging_face_folder_is_a_card_and_names_its_tokenizer(model):
    card = card_named("My Model-1")
    assert (card.name, card.native_context) == ("my_model_1", CONTEXT)
    assert (card.hf_id, card.word, card.start) == ("My Model-1", "'My Model-1'", "")
    ladder = ladder_named("yarn")
    assert start_folder(card, ladder, ladder.stages[0], Path("run")) == Path("models/my_model_1")


def test_an_import_is_a_card_that_a_stage_starts_from(model):
    card = card_named(str(imported(model)))
    ladder = ladder_named("yarn")
    start = start_folder(card, ladder, ladder.stages[0], Path("run"))
    assert start == model.parent / "an import"
    assert card.hf_id == str(model.parent / "an import" / "hugging_face")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("", "--card is missing; there are"),
        ("lama31_8b", "no card is called 'lama31_8b'; did you mean llama31_8b"),
        ("./none", "card ./none: there is no such folder; name an import"),
        ("models/none", "card models/none: there is no such folder"),
        (".", "has no config.json; name the folder of a Hugging Face model"),
        ("hf:../x", "not a Hugging Face hub name"),
        ("hf:", "card hf: names no model; write hf:OWNER/NAME"),
    ],
)
def test_another_word_is_no_card(word, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"card|Hugging") as told:
        card_named(word)
    assert said in str(told.value)


def test_a_folder_with_the_name_of_a_shipped_card_is_that_model_or_is_refused(model):
    other = model.rename("llama31_8b")
    with pytest.raises(ValueError, match="the name of the shipped card llama31_8b and is"):
        card_named(f"./{other}")


def test_a_ladder_is_a_shipped_one_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ladder_named("prolong") is LADDERS["prolong"]
    path = Path("my ladder.yaml")
    path.write_text(ladder_file.template(path))
    ladder = ladder_named(str(path), CARDS["llama3_8b"])
    assert (ladder.name, ladder.word) == ("my_ladder", "'my ladder.yaml'")
    for word, said in (
        ("", "--ladder is missing"),
        ("prolongg", "no ladder is called 'prolongg'; did you mean prolong"),
        ("none.yaml", "there is no ladder file none.yaml"),
    ):
        with pytest.raises(ValueError, match="ladder") as told:
            ladder_named(word)
        assert said in str(told.value)


def test_the_cards_of_a_file_are_known_before_its_rotations(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("cards: [llama3_8b]\n" + ladder_file.template(path))
    with pytest.raises(ValueError, match="rope has no base; state it, or name the card"):
        ladder_named(str(path))
    assert cards_of(str(path)) == ("llama3_8b",)
    assert cards_of("prolong") == LADDERS["prolong"].cards
    with pytest.raises(ValueError, match=r"there is no ladder file none\.yaml"):
        cards_of("none.yaml")


def test_a_file_with_the_name_of_a_shipped_ladder_is_refused(tmp_path):
    path = tmp_path / "prolong.yaml"
    path.write_text(ladder_file.template(path))
    with pytest.raises(ValueError, match="name is 'prolong', which is a shipped ladder"):
        ladder_named(str(path), CARDS["llama3_8b"])


def test_card_and_ladder_are_combined_with_rotations_for_the_card(model):
    card, ladder, said = combined("My Model-1", "yarn")
    assert {stage.rope.base for stage in ladder.stages} == {card.native_rope.base}
    assert len(said) == len(ladder.stages)
