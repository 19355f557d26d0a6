# SPDX-License-Identifier: Apache-2.0
"""Model cards by family."""

from recipes.models import gemma3, llama, mistral, nemotron, olmo3, qwen, smollm3, tiny
from recipes.models.llama import LLAMA31_8B, LLAMA32_1B
from recipes.models.tiny import TINY
from recipes.spec.model_card import ModelCard

__all__ = ["CARDS", "LLAMA31_8B", "LLAMA32_1B", "TINY"]

CARDS: dict[str, ModelCard] = {
    card.name: card
    for family in (tiny, llama, qwen, mistral, nemotron, smollm3, olmo3, gemma3)
    for card in vars(family).values()
    if isinstance(card, ModelCard)
}
"""All cards by name, in the order of the modules."""
