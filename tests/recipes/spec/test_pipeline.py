# SPDX-License-Identifier: Apache-2.0
"""Layers of pipeline stages against those that Megatron-Core builds."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from recipes.spec.pipeline import chunks_in_flight, divides, is_uneven, stages


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


@pytest.mark.parametrize(
    ("layers", "pp", "vpp"),
    [(32, 4, 2), (32, 2, 8), (126, 8, 4), (126, 8, 8), (6, 2, 2), (94, 4, 3)],
)
def test_chunks_have_the_layers_that_megatron_builds_in_them(layers: int, pp: int, vpp: int):
    assert divides(pp, layers, vpp)
    ends = is_uneven(layers, pp, vpp)
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp, pipeline_dtype=torch.float32,
        account_for_embedding_in_pipeline_split=ends, account_for_loss_in_pipeline_split=ends,
    )  # fmt: skip
    for rank, numbers in enumerate(stages(layers, pp, vpp)):
        built: list[int] = []
        for chunk in range(vpp):
            first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=rank) + 1
            count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
            built += range(first, first + count)
        assert list(numbers) == built


@pytest.mark.parametrize("vpp", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 64])
def test_chunks_in_flight_are_those_of_megatron_s_warm_up_and_one(
    vpp: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
):
    for rank in range(4):
        sizes = {"pipeline_model_parallel_world_size": 4, "pipeline_model_parallel_rank": rank,
                 "virtual_pipeline_model_parallel_world_size": vpp}  # fmt: skip
        for name, size in sizes.items():
            monkeypatch.setattr(parallel_state, f"get_{name}", lambda size=size: size)
        _, every, warm_up, _ = get_pp_rank_microbatches(micro_batches, vpp, 4)
        expected = warm_up + (not every)
        assert chunks_in_flight(4, vpp, rank, micro_batches) == expected


def test_the_405b_has_one_layer_fewer_on_both_ends():
    assert [len(stage) for stage in stages(126, 8)] == [15, *[16] * 6, 15]


@pytest.mark.parametrize(("layers", "pp"), [(32, 3), (126, 5), (6, 8), (2, 4), (80, 7)])
def test_stages_that_layers_cannot_fill_are_not_offered(layers: int, pp: int):
    assert not divides(pp, layers)
