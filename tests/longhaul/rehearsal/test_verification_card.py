# SPDX-License-Identifier: Apache-2.0
"""A verification card fits its schema, and says of which shipped recipe it is."""

from dataclasses import replace
from datetime import date

import pytest
import yaml

from longhaul.rehearsal import verification_card as cards
from recipes.ladders import LADDERS
from recipes.shipped.table import ROWS
from tests.house.rooms import TREE

SHIPPED = sorted((TREE / "docs" / "cards").glob("*.yaml"))


def made() -> cards.VerificationCard:
    stage = cards.StageSeen(
        name="tiny_256", seq_length=256, layout={"dp": 2},
        steps=cards.Figure(expected=6.0, seen=6.0),
        tokens_per_step=cards.Figure(expected=2048.0, seen=2048.0),
        first_rate=cards.Figure(expected=2e-3, seen=2e-3),
        loss=cards.Losses(first=6.4, last=4.6), heldout_loss=4.6,
    )  # fmt: skip
    return cards.VerificationCard(
        ladder="tiny", recipe="tiny_2k", command="longhaul rehearse tiny_2k --ranks 2",
        commit="0" * 40, date=date(2026, 11, 21), versions={"torch": "2.13.0"},
        machine={"cpus": "2"}, loss_tolerance=0.02, stages=[stage, replace(stage, name="tiny_1k")],
        checks=["a loss"], seconds=30.0,
    )  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_card_is_of_a_shipped_recipe_and_a_clean_commit(path):
    card = cards.read(path)
    row = ROWS[card.recipe]
    assert row.ladder.name == card.ladder == path.stem
    assert not card.commit.endswith("changes")
    for stage in card.stages:
        for figure in (stage.steps, stage.tokens_per_step, stage.first_rate):
            assert figure.seen == pytest.approx(figure.expected)
        assert stage.loss.last < stage.loss.first


def test_every_ladder_has_its_card():
    assert {path.stem for path in SHIPPED} == set(LADDERS)


@pytest.mark.parametrize(
    "command",
    [
        "longhaul rehearse tiny_2k --ranks 2 --store 'my store'",
        "longhaul rehearse --card tiny --ladder tiny --stage 2K --ranks 2",
    ],
)
def test_a_recipe_is_rehearsed_by_its_name_or_by_its_parts(command):
    assert replace(made(), command=command).command == command


def test_a_card_is_read_as_it_was_written(tmp_path):
    cards.write(made(), tmp_path / "cards" / "tiny.yaml")
    assert cards.read(tmp_path / "cards" / "tiny.yaml") == made()
    assert [path.name for path in (tmp_path / "cards").iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"commit": "main"}, "40 hexadecimal digits"),
        ({"command": "longhaul run --ladder tiny"}, "expected to rehearse tiny_2k"),
        ({"command": "longhaul rehearse tiny_2kk"}, "expected to rehearse tiny_2k"),
        ({"seconds": "thirty"}, "seconds is 'thirty'; expected a number"),
        ({"date": "today"}, "date is 'today'; expected a date"),
        ({"loss_tolerance": 2.0}, "between 0 and 1"),
        ({"checks": []}, "the card lists no checks"),
        ({"stages": []}, "has 2 stages, and the card 0"),
        ({"versions": {"torch": 2.13}}, "versions.torch is 2.13; expected text"),
        ({"note": "fine"}, "has no field 'note'"),
        ({"recipe": None}, "recipe is None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_the_schema_is_refused_with_its_place(tmp_path, changed, said):
    path = tmp_path / "tiny.yaml"
    cards.write(made(), path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changed))
    with pytest.raises(ValueError, match=r"tiny\.yaml") as refused:
        cards.read(path)
    assert said in str(refused.value)


def test_a_field_that_is_missing_deep_inside_is_named(tmp_path):
    path = tmp_path / "tiny.yaml"
    cards.write(made(), path)
    content = yaml.safe_load(path.read_text())
    del content["stages"][1]["loss"]["last"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"stages\[1\]\.loss lacks 'last'"):
        cards.read(path)


def test_losses_are_those_of_the_card_within_its_tolerance():
    card = made()
    seen = {stage.name: stage.loss for stage in card.stages}
    assert cards.same_losses(card, seen) == []
    seen["tiny_1k"] = cards.Losses(first=6.45, last=4.8)
    assert cards.same_losses(card, seen) == [
        "tiny_1k: the last loss is 4.8000 and the card's 4.6000"
    ]
