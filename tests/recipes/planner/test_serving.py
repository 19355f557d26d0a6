# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV caches, and how many GPUs hold, against figures worked out by hand."""

import pytest

from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.serving import kv_cache_bytes, serving
from recipes.spec.units import GiB, K, M
from tests.recipes.planner.search.questions import question


@pytest.mark.parametrize(
    ("card", "length", "size"),
    [
        ("llama31_8b", 128 * K, 16 * GiB),  # 32 layers x 8 heads x 128 x 2 x 2 bytes: 128 KiB
        ("llama31_8b", 1 * M, 128 * GiB),
        ("gemma3_1b", 128 * K, 1024 * (4 * 128 * K + 22 * 512)),  # one head of 256
        ("gemma3_1b", 256, 1024 * 26 * 256),  # within the window
        ("smollm3_3b", 64 * K, 4 * 512 * 36 * 64 * K),  # layers that differ, without a window
    ],
)
def test_a_cache_has_the_keys_and_values_of_every_token_that_its_layers_see(card, length, size):
    assert kv_cache_bytes(CARDS[card], length, 2) == size
    assert kv_cache_bytes(CARDS[card], length, 1) == size // 2


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_a_cache_is_the_sum_of_its_layers(card):
    for length in (300, 5000, 128 * K):
        kept = 0
        for layer in range(1, card.layers + 1):
            window = card.pattern and card.pattern.window_of(layer)
            kept += min(length, window) if window else length
        assert kv_cache_bytes(card, length, 1) == 2 * kept * card.kv_heads * card.head_dim


def on(card: str, words: str, length: int):
    """Return what is served on the DGX H100 of a layout."""
    layout = layout_from(words)
    asked = question(card=CARDS[card], gpus=layout.world_size, seq_length=length)
    return serving(asked.plan(layout))


@pytest.mark.parametrize(
    ("card", "words", "length", "tp", "pp", "sequences"),
    [
        # 0.96 x 79.1 - 4 - 14.96 / 8 GiB of weights: 70.07 GiB a GPU
        ("llama31_8b", "ulysses8", 128 * K, 8, 1, (35, 70)),  # of 2 and 1 GiB on each
        ("llama31_8b", "ulysses8 dp4", M, 8, 1, (16, 32)),  # 4 and 8 on each of 4 nodes
        ("llama31_8b", "ulysses2", 128 * K, 2, 1, (8, 16)),  # 64.46 GiB, of 8 and 4
        ("gemma3_1b", "dp8", 128 * K, 4, 1, (278, 558)),  # 4 query heads; the KV head on each
        ("llama31_405b", "tp8", 128 * K, 8, 0, (0, 0)),  # 94.5 GiB of weights on each
        # 126 layers: caches of 63 GiB; on a GPU of two nodes 71.94 - 47.24 GiB, of 3.94 and 1.97
        ("llama31_405b", "tp8 dp2", 128 * K, 8, 2, (6, 12)),
        ("llama31_405b", "tp8 dp5", 128 * K, 8, 2, (12, 24)),  # a fifth node is left over
    ],
)
def test_what_is_left_next_to_the_weights_holds_whole_sequences(
    card, words, length, tp, pp, sequences
):
    found = on(card, words, length)
    assert (found.tensor_parallel, found.pipeline) == (tp, pp)
    assert tuple(found.sequences.values()) == sequences
