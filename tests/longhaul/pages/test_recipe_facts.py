# SPDX-License-Identifier: Apache-2.0
"""What pages say of a model."""

from longhaul.pages import recipe_facts
from longhaul.terminal.next_commands import importing
from recipes.models import CARDS


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
