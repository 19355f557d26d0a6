# SPDX-License-Identifier: Apache-2.0
"""Layers of pipeline stages against those that Megatron-Core builds."""

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from recipes.spec.pipeline import divides, is_uneven, stages


@pytest.mark.parametrize(
    ("layers", "pp"), [(126, 8), (126, 16), (126, 7), (32, 4), (94, 8), (30, 4), (6, 4), (5, 1)]
)
def test_stages_have_the_layers_that_megatron_builds_on_them(layers: int, pp: int):
    assert divides(pp, layers)
    ends = is_uneven(layers, pp)
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, account_for_embedding_in_pipeline_split=ends,
        account_for_loss_in_pipeline_split=ends,
    )  # fmt: skip
    for rank, numbers in enumerate(stages(layers, pp)):
        assert len(numbers) == get_num_layers_to_build(config, pp_rank=rank)
        assert numbers[0] == get_transformer_layer_offset(config, pp_rank=rank) + 1
    assert [n for stage in stages(layers, pp) for n in stage] == list(range(1, layers + 1))


def test_the_405b_has_one_layer_fewer_on_both_ends():
    assert [len(stage) for stage in stages(126, 8)] == [15, *[16] * 6, 15]


@pytest.mark.parametrize(("layers", "pp"), [(32, 3), (126, 5), (6, 8), (2, 4), (80, 7)])
def test_stages_that_layers_cannot_fill_are_not_offered(layers: int, pp: int):
    assert not divides(pp, layers)
