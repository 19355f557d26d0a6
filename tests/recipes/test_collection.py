# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from recipes.collection import ROWS
from recipes.naming import length_word
from recipes.units import K, M


@pytest.mark.parametrize(
    ("tokens", "word"),
    [(512, "512"), (1536, "1536"), (2 * K, "2k"), (K * K + K, "1025k"), (4 * M, "4m")],
)
def test_a_length_is_named_exactly(tokens, word):
    assert length_word(tokens) == word


def test_every_ladder_of_a_card_has_a_row_for_each_stage():
    ladders = {(row.card.name, row.ladder.name): row.ladder for row in ROWS.values()}
    for (card, name), ladder in ladders.items():
        lengths = [
            row.seq_length
            for row in ROWS.values()
            if (row.card.name, row.ladder.name) == (card, name)
        ]
        assert lengths == [stage.seq_length for stage in ladder.stages]


def test_more_nodes_are_more_data_ranks():
    row = ROWS["llama31_8b_nemo_64k"]
    assert row.on(4).dp == 4 * row.layout.dp
    assert row.on(4).world_size == 4 * row.layout.world_size


def test_nodes_that_hold_no_whole_replica_are_refused():
    row = ROWS["llama31_8b_nemo_64k"]
    two_nodes = replace(row, nodes=2, layout=replace(row.layout, dp=1))
    with pytest.raises(ValueError, match="takes 8 ranks a replica; 1 nodes of 4"):
        two_nodes.on(1)


def test_cpu_ranks_are_spread_over_nodes():
    row = ROWS["tiny_2k"]
    assert row.on(2) == row.layout
