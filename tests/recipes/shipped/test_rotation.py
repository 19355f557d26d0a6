# SPDX-License-Identifier: Apache-2.0
"""A ladder's rotations for another card: kept, recomputed for its base, or refused."""

from dataclasses import replace

import pytest

from custom_modules.rope.config import RopeScaling
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped.rotation import for_card, is_possible, rotation_refusal
from recipes.spec.units import K


@pytest.mark.parametrize("name", LADDERS)
def test_a_ladder_stays_as_it_is_for_its_own_cards(name):
    ladder = LADDERS[name]
    for card in ladder.cards:
        assert for_card(ladder, CARDS[card]) == (ladder, [])


def test_a_formula_reaches_the_same_context_from_the_card_s_base_and_context():
    ladder, said = for_card(LADDERS["yarn"], CARDS["llama3_8b"])
    assert [stage.rope for stage in ladder.stages] == [
        RopeScaling.yarn(base=500_000, factor=factor, original_length=8 * K) for factor in (8, 16)
    ]
    assert [stage.rope.reach for stage in ladder.stages] == [64 * K, 128 * K]
    assert "recomputed for llama3_8b: yarn by 8 from 8K at base 500,000" in said[0]
    assert all(rotation_refusal(CARDS["llama3_8b"], stage) is None for stage in ladder.stages)


def test_a_base_change_is_for_the_rotated_part_of_the_card_s_heads():
    ladder, said = for_card(LADDERS["prolong"], CARDS["nemotron4_15b"])
    assert {stage.rope.partial_rotary_factor for stage in ladder.stages} == {0.5}
    assert "base 8,000,000 for 0.5 of a head" in said[0]


@pytest.mark.parametrize(
    ("ladder", "card", "said"),
    [
        ("longrope2", "llama32_1b", "the divisors of longrope are found for one model"),
        ("llama2_long_32k", "qwen25_7b", "base 500,000 is below that of qwen25_7b"),
        ("yarn", "llama31_8b", "the card's context is 131,072 already; leave the stage out"),
    ],
)
def test_what_the_card_cannot_take_is_refused(ladder, card, said):
    with pytest.raises(ValueError, match=f"ladder {ladder} cannot train {card} at") as told:
        for_card(LADDERS[ladder], CARDS[card])
    assert said in str(told.value)


def own(*stages, name="mine"):
    return replace(LADDERS["yarn"], name=name, cards=("llama3_8b",), path="l.yaml", stages=stages)


def test_a_rotation_that_reaches_less_than_the_card_s_context_is_refused():
    stage = replace(LADDERS["yarn"].stages[0], rope=RopeScaling.yarn(
        base=500_000, factor=8, original_length=8 * K))  # fmt: skip
    ladder = own(replace(stage, seq_length=256 * K))
    with pytest.raises(ValueError, match="reaches 65,536 tokens and the context of llama31_8b is"):
        for_card(ladder, CARDS["llama31_8b"])
    assert for_card(own(stage), CARDS["llama3_8b"]) == (own(stage), [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_length": 4 * K, "rope": "native"}, "its context is 8,192 tokens already; begin"),
        ({"rope": RopeScaling.yarn(base=500_000, factor=2, original_length=8 * K)},
         "reaches 16,384 tokens and the stage trains for 65,536; raise its factor"),
    ],
    ids=["within the context", "short of the stage"],
)  # fmt: skip
def test_a_user_s_ladder_is_checked_for_its_own_cards_too(change, said):
    ladder = own(replace(LADDERS["yarn"].stages[0], **change))
    with pytest.raises(ValueError, match=r"llama3_8b|mine") as told:
        for_card(ladder, CARDS["llama3_8b"])
    assert said in str(told.value)


@pytest.mark.parametrize("cards", [("llama3_8b",), ()], ids=["its card", "no cards"])
def test_a_user_s_rotations_are_kept_and_the_first_is_compared_with_the_card(cards):
    other = RopeScaling.yarn(base=7.0, factor=8, original_length=8 * K)
    first, second = LADDERS["yarn"].stages
    stages = (replace(first, rope=other), replace(second, rope=replace(other, factor=16)))
    ladder = replace(own(*stages), cards=cards)
    found, (said,) = for_card(ladder, CARDS["llama3_8b"])
    assert found == ladder
    assert said == (
        "stage 64K of ladder mine: llama3_8b was trained at base 500,000 on 8,192 tokens; its "
        "rotation is kept as stated"
    )


def test_rotations_of_a_file_for_other_cards_are_recomputed_or_refused_with_the_file():
    ladder = own(LADDERS["yarn"].stages[0])
    found, said = for_card(ladder, CARDS["llama3_70b"])
    assert found.stages[0].rope.base == 500_000
    assert "its rotation is recomputed for llama3_70b" in said[0]
    ladder = own(LADDERS["longrope2"].stages[0])
    with pytest.raises(ValueError, match=r"state its rotation for \w+ in l\.yaml and add it to"):
        for_card(replace(ladder, cards=("llama2_7b",)), CARDS["qwen25_7b"])


def test_a_rotation_that_stretches_the_card_s_own_one_is_its_own():
    card = CARDS["llama31_8b"]
    further = RopeScaling.yarn(
        base=500_000, factor=2, original_length=128 * K, before=card.native_rope
    )
    ladder = replace(own(replace(LADDERS["yarn"].stages[0], rope=further, seq_length=256 * K)))
    assert for_card(replace(ladder, cards=("llama31_8b",)), card) == (
        replace(ladder, cards=("llama31_8b",)), []
    )  # fmt: skip


def test_what_llama_3_s_scaling_reaches_is_not_read_from_its_factor():
    ladder = replace(LADDERS["llama31"], name="mine", path="l.py")
    assert for_card(ladder, CARDS["llama3_8b"]) == (ladder, [])


def test_a_stage_beyond_the_card_s_context_in_its_own_rotation_is_noted():
    ladder = own(replace(LADDERS["yarn"].stages[0], rope="native"))
    (said,) = for_card(ladder, CARDS["llama3_8b"])[1]
    assert "keeps the rotation of llama3_8b, which was trained at 8,192 tokens" in said


def test_a_base_alone_over_another_scaling_stays_and_is_said():
    ladder, said = for_card(LADDERS["prolong"], CARDS["llama31_8b"])
    assert ladder == LADDERS["prolong"]
    assert [words.partition(": ")[0] for words in said] == [
        "stage 64K of ladder prolong", "stage 512K of ladder prolong",
    ]  # fmt: skip
    assert said[0].endswith("takes away the scaling that llama31_8b was trained with")


def test_of_one_stage_only_its_own_rotation_has_to_suit():
    ladder = LADDERS["yarn"]
    assert not is_possible(ladder, CARDS["llama31_8b"], 64 * K)
    stages = (ladder.stages[0], replace(ladder.stages[1], seq_length=512 * K, rope="native"))
    mixed = replace(ladder, stages=stages)
    assert is_possible(mixed, CARDS["llama31_8b"], 512 * K)
    assert not is_possible(mixed, CARDS["llama31_8b"], 64 * K)


def test_a_card_that_is_stretched_already_takes_no_other_formula():
    stretched = RopeScaling.yarn(base=500_000, factor=4, original_length=8 * K)
    card = replace(CARDS["llama3_8b"], native_rope=stretched, native_context=32 * K)
    with pytest.raises(ValueError, match="stretched by yarn already"):
        for_card(LADDERS["yarn"], card)
