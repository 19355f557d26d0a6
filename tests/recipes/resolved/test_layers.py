# SPDX-License-Identifier: Apache-2.0
"""Checks and notes of a recipe whose layers differ."""

import copy

import pytest

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
