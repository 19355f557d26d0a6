# SPDX-License-Identifier: Apache-2.0
"""What may be asked of a layer's memory, and what is refused before a model is built."""

import pytest
import torch

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, SavedTensors, Tiling
from tests.custom_modules.support import llamas


@pytest.mark.parametrize(
    ("noun", "fields", "words"),
    [
        (Recompute, {"kind": "everything"}, "'everything' is unknown; choose none, full"),
        (Recompute, {"kind": "full", "every": 0}, "every is 0"),
        (Recompute, {"every": 2}, "every is 2, which has no effect on none"),
        (Recompute, {"kind": "uniform", "every": 2}, "no effect on uniform"),
        (Recompute, {"kind": "full", "others": "kept_attention"}, "every layer is full"),
        (Recompute, {"kind": "full", "every": 2, "others": "block"}, "others 'block' is unknown"),
        (Recompute, {"kind": "full", "layers": 2}, "layers is 2, which has no effect on full"),
        (Recompute, {"kind": "block", "layers": 0}, "layers is 0"),
        (Recompute, {"kind": "full", "modules": ["mlp"]}, "no effect on full"),
        (Recompute, {"kind": "selective"}, "takes one or more of core_attn"),
        (Recompute, {"kind": "selective", "modules": ["moe"]}, r"modules are \['moe'\]"),
        (Tiling, {"loss": True, "loss_tile": 0}, "loss_tile is 0 tokens"),
        (Tiling, {"mlp": True, "mlp_tile": -1}, "mlp_tile is -1 tokens"),
        (Tiling, {"mlp_tile": 8}, "no effect without tiling mlp"),
        (Offload, {"tensors": "weights"}, "'weights' is unknown; choose none, inputs"),
        (Offload, {"tensors": "both"}, "cap_gib is 0; give the host memory"),
        (Offload, {"tensors": "both", "cap_gib": 1, "every": 0}, "every is 0"),
        (Offload, {"cap_gib": 1}, "no effect without tensors"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_choice_that_means_nothing_is_refused(noun, fields, words):
    with pytest.raises(ValueError, match=words):
        noun(**fields)


@pytest.mark.parametrize(
    ("recompute", "tensors", "words"),
    [
        ({}, "inputs", "recompute is none; choose one of them"),
        ({"kind": "block"}, "both", "recompute is block"),
        ({"kind": "full"}, "attention", "keeps no attention output; choose inputs"),
        ({"kind": "full"}, "inputs", None),
        ({"kind": "full", "every": 2, "others": "kept_attention"}, "both", None),
        ({"kind": "kept_attention"}, "both", None),
    ],
)
def test_offload_needs_something_kept(recompute, tensors, words):
    refusal = Offload(tensors=tensors, cap_gib=1).refusal(Recompute(**recompute))
    assert refusal is None if words is None else words in refusal


def test_layers_take_their_kinds_in_turn_by_their_number_in_the_whole_model():
    mixed = Recompute(kind="kept_attention", every=3, others="full")
    assert [mixed.of_layer(number) for number in range(1, 8)] == [
        "kept_attention", "full", "full", "kept_attention", "full", "full", "kept_attention",
    ]  # fmt: skip
    assert Recompute(kind="block", layers=2).of_layer(1) == "none"  # Megatron-Core's block does it


def test_saved_bytes_are_those_of_the_tensors():
    saved = SavedTensors(tokens=12, hidden=8, heads=2, head_dim=4, tp=2, element_bytes=2)
    assert saved.input_bytes == 6 * 8 * 2
    assert saved.attention_bytes == 12 * 2 * (4 * 2 + 4)
    mixed = Recompute(kind="kept_attention", every=2, others="full")
    both = Offload(tensors="both", cap_gib=1)
    per_micro_batch = 4 * saved.input_bytes + 2 * saved.attention_bytes
    assert saved.on_host(both, mixed, layers=range(1, 5), in_flight=3) == 3 * per_micro_batch
    second = Offload(tensors="both", cap_gib=1, every=2)
    assert saved.on_host(second, mixed, layers=range(2, 5)) == (
        saved.input_bytes + saved.attention_bytes
    )


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize(
    ("config", "cp", "memory", "words"),
    [
        (
            {"recompute_granularity": "full", "recompute_method": "block",
             "recompute_num_layers": 1},
            "ulysses", {"recompute": Recompute(kind="full")},
            "recompute is full and Megatron-Core's recompute_granularity 'full'",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            "ulysses", {"tiling": Tiling(mlp=True)},
            "both rebuild the MLP",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            "head_chunked", {},
            "keeps no queries, keys and values",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "ulysses", {},
            "with Transformer Engine only",
        ),
        (
            {}, "ulysses", {"recompute": Recompute(kind="uniform")},
            "recompute uniform is Megatron-Core's: set recompute_granularity",
        ),
        (
            {}, "ulysses", {"offload": Offload(tensors="inputs", cap_gib=1)},
            "recompute is none",
        ),
        (
            {}, "p2p", {"recompute": Recompute(kind="kept_attention")},
            "only Transformer Engine can keep",
        ),
    ],
)  # fmt: skip
def test_ways_to_recompute_that_exclude_each_other_are_refused(config, cp, memory, words):
    from custom_modules.rope.config import RopeScaling

    with pytest.raises(ValueError, match=words):
        llamas.ours(
            RopeScaling.base_change(1000), {}, torch.float32,
            cp=ContextParallelKind(kind=cp), memory=memory, **config,
        )  # fmt: skip
