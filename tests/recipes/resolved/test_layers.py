# SPDX-License-Identifier: Apache-2.0
"""Checks and notes of a recipe whose layers differ."""

import copy
from dataclasses import replace

import pytest

from custom_modules.rope.config import RopeScaling
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.pretrain import pretrain
from recipes.resolved.check import check, notes
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.units import K


def of_olmo3(ladder: str):
    spread = Layout(tp=4, cp=ContextParallel.ring(2))
    return pretrain(CARDS["olmo3_8k_7b"], LADDERS[ladder], 64 * K, spread)


@pytest.mark.parametrize(("ladder", "told"), [("prolong", True), ("olmo3_7b", False)])
def test_a_base_that_olmo3_cannot_be_exported_with_is_told(ladder, told):
    recipe = of_olmo3(ladder)
    check(recipe)
    assert ["has one base for all layers" in note for note in notes(recipe)] == [True] * told


def test_local_layers_that_rotate_by_more_than_a_base_cannot_be_exported_which_is_told():
    card = CARDS["olmo3_8k_7b"]
    stretched = RopeScaling.yarn(base=500_000, factor=4.0, original_length=8 * K)
    pattern = replace(card.pattern, local_rope=stretched)
    spread = Layout(tp=4, cp=ContextParallel.ring(2))
    ladder = LADDERS["olmo3_7b"]
    recipe = pretrain(replace(card, pattern=pattern), ladder, 64 * K, spread)
    (note,) = notes(recipe)
    assert note.startswith("a rotation of local layers by yarn can be trained but not exported")
    assert "a rotation by yarn of base 500,000 of their own" in pattern.describe()


def test_a_pattern_that_is_none_is_one_sentence():
    recipe = copy.deepcopy(of_olmo3("olmo3_7b"))
    recipe.model.config.pattern.every = 1
    with pytest.raises(ValueError, match="every of a layer pattern is 1") as error:
        check(recipe)
    assert len(str(error.value).splitlines()) == 1


def test_another_window_than_the_card_s_is_refused():
    recipe = copy.deepcopy(of_olmo3("olmo3_7b"))
    recipe.model.config.pattern.window = 512
    with pytest.raises(ValueError, match=r"pattern\.window is 512, but .* for 4096"):
        check(recipe)
