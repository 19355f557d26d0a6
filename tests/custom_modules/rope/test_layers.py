# SPDX-License-Identifier: Apache-2.0
"""Which layers differ, and how much they attend to."""

import pytest

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern

OLMO3 = LayerPattern(every=4, window=4096, local_rope=RopeScaling.base_change(500_000))
SMOLLM3 = LayerPattern(every=4, full_rotates=False)


def test_every_nth_layer_is_full():
    assert [OLMO3.window_of(layer) for layer in range(1, 9)] == [4096, 4096, 4096, None] * 2
    assert [OLMO3.turn_of(layer) for layer in range(1, 5)] == ["local"] * 3 + ["stage"]
    assert [SMOLLM3.turn_of(layer) for layer in range(1, 5)] == ["stage"] * 3 + ["none"]
    assert [SMOLLM3.window_of(layer) for layer in range(1, 5)] == [None] * 4


@pytest.mark.parametrize("layers", [4, 13, 26])
def test_stages_have_the_full_layers_of_the_model(layers):
    pattern = LayerPattern(every=6, window=512)
    counted = [pattern.is_full(layer) for layer in range(1, 2 * layers + 1)]
    assert pattern.full_layers(layers) == sum(counted[:layers])
    assert pattern.full_layers(layers, first=layers + 1) == sum(counted[layers:])


@pytest.mark.parametrize(("length", "window"), [(100, 7), (100, 100), (100, 200), (64, 1)])
def test_the_length_that_is_attended_to_counts_the_pairs_of_the_mask(length, window):
    pattern = LayerPattern(every=2, window=window)
    pairs = sum(min(query + 1, window) for query in range(length))
    whole = length * (length + 1) / 2
    # Pairs are counted without the diagonal's half, as in S^2 / 2 for causal attention.
    local = pattern.attended_length(length, 2) - length
    assert local * length / 2 == pytest.approx(pairs - min(window, length) / 2, rel=1e-12)
    assert length * length / 2 == whole - length / 2


@pytest.mark.parametrize("pattern", [OLMO3, SMOLLM3])
def test_a_pattern_survives_json(pattern):
    assert LayerPattern.from_dict(pattern.to_dict()) == pattern


def test_a_pattern_is_said_in_words():
    assert OLMO3.describe() == (
        "full attention in every 4th layer; the others have a window of 4,096 tokens and a "
        "rotation of base 500,000 of their own"
    )
    assert SMOLLM3.describe() == "no rotation in every 4th layer"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"every": 1, "window": 8}, "every of a layer pattern is 1; it is at least 2"),
        ({"every": 4, "window": 0}, "window of a layer pattern is 0; it is at least 1"),
        ({"every": 4}, "no layer differs in the pattern with every 4"),
        (
            {"every": 4, "full_rotates": False, "local_rope": RopeScaling.base_change(1e4)},
            "would turn no layer; leave one of the two out",
        ),
        (
            {
                "every": 4,
                "local_rope": RopeScaling.dynamic(base=1e4, factor=2.0, original_length=8),
            },
            "local_rope is dynamic, which depends on the sequence's length",
        ),
    ],
)
def test_a_pattern_without_sense_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        LayerPattern(**fields)


def test_an_unknown_field_of_a_pattern_is_refused():
    with pytest.raises(ValueError, match="a layer pattern has no 'windows'; it has every, window"):
        LayerPattern.from_dict({"every": 4, "windows": 8})
    with pytest.raises(ValueError, match="needs every, the distance of full layers"):
        LayerPattern.from_dict({"window": 8})
