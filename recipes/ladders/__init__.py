# SPDX-License-Identifier: Apache-2.0
"""Ladders, one source a module."""

from recipes.ladders.llama_128k import LLAMA_128K
from recipes.ladders.tiny import TINY_LADDER
from recipes.stages import Ladder

__all__ = ["LADDERS", "LLAMA_128K", "TINY_LADDER"]

LADDERS: dict[str, Ladder] = {ladder.name: ladder for ladder in (TINY_LADDER, LLAMA_128K)}
