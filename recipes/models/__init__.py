# SPDX-License-Identifier: Apache-2.0
"""Model cards by family."""

from recipes.model_card import ModelCard
from recipes.models.llama import LLAMA31_8B, LLAMA32_1B
from recipes.models.tiny import TINY

__all__ = ["CARDS", "LLAMA31_8B", "LLAMA32_1B", "TINY"]

CARDS: dict[str, ModelCard] = {card.name: card for card in (TINY, LLAMA31_8B, LLAMA32_1B)}
