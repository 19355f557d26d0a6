# SPDX-License-Identifier: Apache-2.0
"""How pages describe models and rotations."""

from dataclasses import replace

import pytest

from custom_modules.rope.config import RopeScaling
from longhaul.pages import recipe_facts
from longhaul.terminal.next_commands import importing
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.spec.units import K


def test_a_page_says_which_layers_differ():
    said = {name: "\n".join(recipe_facts.model(card)) for name, card in CARDS.items()}
    assert "layers differ: no rotation in every 4th layer\n" in said["smollm3_3b"]
    assert (
        "layers differ: full attention in every 6th layer; the others have a window of 512 tokens "
        "and a rotation of base 10,000 of their own\n"
    ) in said["gemma3_1b"]
    assert [name for name in said if "layers differ" in said[name]] == [
        name for name, card in CARDS.items() if card.pattern is not None
    ]


def test_weights_of_a_branch_are_imported_by_its_name():
    card = CARDS["olmo3_8k_7b"]
    assert importing(card) == (
        "longhaul import --from allenai/Olmo-3-1025-7B --revision stage2-step47684 "
        "--card olmo3_8k_7b"
    )
    assert "Hugging Face: allenai/Olmo-3-1025-7B, revision stage2-step47684" in [
        *recipe_facts.model(card)
    ]
    assert "--revision" not in importing(CARDS["olmo3_7b"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope": "native"}, "llama3 x8 (the card's own)"),
        ({"rope": RopeScaling.llama3()}, "llama3 x8 (the card's own)"),
        ({"rope": RopeScaling.base_change(8e6)}, "base 8,000,000"),
        (
            {"rope": RopeScaling.yarn(base=4e6, factor=4, original_length=16 * K)},
            "yarn x4, base 4,000,000",
        ),
        (
            {"rope": RopeScaling.yarn(base=5e5, factor=4, original_length=16 * K,
                                      before=RopeScaling.llama3())},
            "yarn x4 over llama3 x8",
        ),
    ],
)  # fmt: skip
def test_a_rotation_in_words(change, words):
    stage = replace(LADDERS["nemo"].stages[1], **change)
    assert recipe_facts.rotation(stage, CARDS["llama31_8b"]) == words


def test_a_rotation_in_full_has_its_parameters_and_temperature():
    of_stage = LADDERS["ultralong_1m"].stages[0].rope
    assert recipe_facts.rotation_in_full(of_stage) == (
        "yarn x128 of 8,192 tokens, base 500,000, beta_fast 4; temperature 1.485"
    )
    searched = LADDERS["longrope2"].stages[0].rope
    assert recipe_facts.rotation_in_full(searched).startswith(
        "longrope x16 of 8,192 tokens, base 500,000;"
    )
