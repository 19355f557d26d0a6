# SPDX-License-Identifier: Apache-2.0
"""The comparison of records: what it finds, and what an explanation covers."""

import pytest

from tests.oracles.command import table
from tests.oracles.compare import Explanation, differences, keeps_values, unused

BASE = {
    "tiny": {
        "_target_": "a.old.pretrain",
        "lr": 0.001,
        "callbacks": [{"_target_": "a.Log", "path": "x"}, {"_target_": "a.Guard"}],
    }
}


def explained(**given: str) -> list[Explanation]:
    return [Explanation.of({"reason": "a test", **given})]


def places(here: dict, explanations: list[Explanation] = ()) -> list[str]:  # type: ignore[assignment]
    return [one.place for one in differences("recipes", BASE, here, list(explanations))]


def changed(**fields: object) -> dict:
    return {"tiny": {**BASE["tiny"], **fields}}


def test_equal_records_do_not_differ():
    assert places(BASE) == []


def test_a_changed_value_is_found_by_its_place():
    assert places(changed(lr=0.0010000000000000002)) == ["recipes/tiny/lr"]


def test_an_entry_that_is_missing_is_found():
    assert "recipes/tiny/lr" in places({})


def test_a_new_callback_is_found_once_and_moves_no_other():
    callbacks = [{"_target_": "a.New"}, *BASE["tiny"]["callbacks"]]
    assert places(changed(callbacks=callbacks)) == ["recipes/tiny/callbacks[a.New]/_target_"]
    added = explained(on="recipes/*/callbacks[a.New]*", kind="added")
    assert places(changed(callbacks=callbacks), added) == []


def test_callbacks_in_another_order_are_found():
    callbacks = BASE["tiny"]["callbacks"][::-1]
    assert places(changed(callbacks=callbacks)) == ["recipes/tiny/callbacks"]


def test_a_renamed_target_is_explained_and_another_value_is_not():
    renames = explained(on="recipes/*", kind="renamed", old="a.old.pretrain", new="a.new.pretrain")
    here = changed(_target_="a.new.pretrain")
    assert places(here, renames) == []
    assert unused(renames, ["recipes"]) == []
    assert places(changed(_target_="a.other.pretrain"), renames) == ["recipes/tiny/_target_"]


def test_an_explanation_of_nothing_is_reported():
    renames = explained(on="recipes/*/lr", kind="removed")
    assert places(BASE, renames) == []
    assert unused(renames, ["recipes"]) == renames
    assert unused(renames, ["plans"]) == []


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ("error: --nodes is 0; expected at least 1", True),
        ("error: at least 1 node is needed, and 0 are given", True),
        ("error: nodes must be positive", False),
    ],
)
def test_a_message_may_be_reworded_if_it_keeps_its_values(now, kept):
    was = "error: --nodes is 0; it must be at least 1"
    assert keeps_values(was, now, named="0") == kept


def test_a_message_that_loses_a_value_is_no_rewording():
    base, here = (
        {"plan": {"code": 2, "named": "int8", "message": f"error: {text}"}}
        for text in ("--fp8 is 'int8'", "--fp8 is unknown")
    )
    (found,) = differences("refusals", base, here, [])
    assert (found.place, found.reworded) == ("refusals/plan/message", False)
    here["plan"]["message"] = "error: no FP8 recipe is called 'int8'"
    (found,) = differences("refusals", base, here, [])
    assert found.reworded


def test_the_lists_of_what_may_differ_are_well_formed():
    for entry in table("renames.yaml"):
        Explanation.of(entry)
    assert set(table("words.yaml")) == {"rewrite", "lines", "dropped"}
