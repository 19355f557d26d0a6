# SPDX-License-Identifier: Apache-2.0
"""Facts of a base that make its context hard to extend."""

from dataclasses import replace

import pytest

from recipes.models import CARDS
from recipes.spec.extension_facts import card_facts, lines
from recipes.spec.layout import ContextParallel, Layout


def names(card: str) -> list[str]:
    return [fact.name for fact in card_facts(CARDS[card])]


@pytest.mark.parametrize(
    ("card", "found"),
    [
        ("llama3_8b", []),
        ("llama2_7b", ["native_context"]),
        ("olmo3_7b", ["qk_norm", "window"]),
        ("smollm3_4k_3b", ["native_context", "unrotated_layers"]),
        ("gemma3_1b", ["qk_norm", "window"]),
        ("llama2_70b", ["kv_heads", "native_context"]),
        ("qwen3_8b", ["qk_norm"]),
        ("qwen3_32b", ["qk_norm", "kv_heads"]),
    ],
)
def test_a_card_has_the_facts_that_its_shape_states(card, found):
    assert names(card) == found


def test_windows_and_layers_without_rotation_are_said_with_their_numbers():
    card = replace(CARDS["olmo3_7b"], kv_heads=4)
    facts = card_facts(card)
    assert [fact.name for fact in facts] == ["qk_norm", "kv_heads", "window"]
    said = lines(facts)
    assert said[0].startswith("3 of 4 choices that add up")
    assert said[2].startswith("few KV heads: 8 query heads share each of 4 (more than 4")
    assert "24 of 32 layers attend within a window of 4,096 tokens, so only the other 8" in said[3]
    *_, said = lines(card_facts(CARDS["smollm3_4k_3b"]))
    assert said.startswith("9 of 36 layers have no rotation")


def test_a_window_that_is_not_shorter_than_the_stage_limits_nothing():
    card = CARDS["olmo3_8k_7b"]
    window = card.pattern.window
    assert "window" in [fact.name for fact in card_facts(card, length=window + 1)]
    assert "window" not in [fact.name for fact in card_facts(card, length=window)]


def test_few_kv_heads_are_said_of_ranks_that_ulysses_alone_cannot_use():
    card = CARDS["llama31_8b"]  # 8 KV heads
    assert not card_facts(card, Layout(cp=ContextParallel.ulysses(8)))
    (fact,) = card_facts(card, Layout(tp=2, cp=ContextParallel.ring(32)))
    assert (fact.name, fact.counted) == ("ulysses", False)
    assert "8 KV heads are fewer than TP x CP = 64" in fact.words
    assert lines([fact]) == [fact.words]  # nothing to count
    *_, fact = card_facts(CARDS["gemma3_1b"], Layout(cp=ContextParallel.ring(8)))
    assert fact.words.startswith("1 KV head is fewer than TP x CP = 8")


def test_kv_heads_that_ulysses_repeats_evenly_are_no_limit():
    card = CARDS["smollm3_4k_3b"]  # 4 KV heads
    names = [fact.name for fact in card_facts(card, Layout(cp=ContextParallel.ulysses(8)))]
    assert "ulysses" not in names
