# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import yaml

from recipes.ladders import LADDERS, NEMO
from recipes.megatron_bridge.config import container, left_out, refusals, text
from recipes.models import CARDS
from recipes.shipped.table import ROWS
from recipes.spec.layout import Fp8, Layout
from recipes.spec.units import K

EXPORTED = [
    row for row in ROWS.values() if not [*refusals(row.card, row.stage, row.layout)]
]  # fmt: skip


def tree(name: str) -> dict:
    row = ROWS[name]
    return container(row.card, row.ladder, row.seq_length, row.layout)


def row_of(name: str, **layout: object):
    row = ROWS[name]
    return row.card, row.ladder, row.seq_length, replace(row.layout, **layout)


@pytest.mark.parametrize("row", EXPORTED, ids=lambda row: row.name)
def test_an_exported_recipe_has_the_numbers_of_its_stage_and_layout(row):
    made = container(row.card, row.ladder, row.seq_length, row.layout)
    model, stage, layout = made["model"], row.stage, row.layout
    assert made["train"]["train_iters"] * made["train"]["global_batch_size"] == (
        stage.steps * stage.tokens_per_batch // stage.seq_length
    )
    sizes = ("tensor_model", "context", "pipeline_model")
    ranks = [model[f"{name}_parallel_size"] for name in sizes]
    assert ranks == [layout.tp, layout.cp.size, layout.pp]
    assert made["optimizer"]["lr"] == stage.lr.peak
    assert made["scheduler"]["lr_warmup_iters"] == stage.lr.warmup_steps(stage.steps)
    assert made["dataset"]["seq_length"] == model["seq_length"] == stage.seq_length
    assert model["transformer_layer_spec"]["cp"]["kind"] == layout.cp.how.kind
    assert model["transformer_layer_spec"]["recompute"]["kind"] == layout.recompute.kind


def test_the_rotation_is_stated_in_megatrons_own_fields():
    assert tree("llama3_8b_nemo_16k")["model"]["rotary_base"] == 500_000
    scaled = tree("llama31_8b_nemo_16k")["model"]
    assert (scaled["rope_scaling"], scaled["rope_scaling_factor"]) == (True, 8.0)


def test_the_yaml_is_plain_and_says_what_is_not_in_it():
    row = ROWS["llama31_8b_nemo_64k"]
    written = text(row.card, row.ladder, row.seq_length, row.layout)
    assert yaml.safe_load(written) == container(row.card, row.ladder, row.seq_length, row.layout)
    assert "&id" not in written
    assert "the loss in tiles of 4,096 tokens" in written
    assert not any("tiles" in what for what in left_out(row.stage, ROWS["tiny_512"].layout))


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("llama31_8b_ultralong_1m", {}, "rotation yarn is not Megatron-Core's own"),
        ("llama3_8b_prolong_64k", {}, "documents are kept apart"),
        ("llama3_8b_nemo_16k", {"tp": 5}, "128,256 is not a multiple of tp 5"),
        ("llama3_8b_nemo_16k", {"sharding": "parameters"}, "Megatron FSDP's"),
        ("llama3_8b_nemo_16k", {"fp8": Fp8(recipe="tensorwise")}, "fp8 tensorwise"),
    ],
)
def test_a_stage_that_bridge_would_train_otherwise_is_refused(name, layout, words):
    with pytest.raises(ValueError, match="as a configuration of Megatron-Bridge") as refused:
        container(*row_of(name, **layout))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["smollm3_3b", "olmo3_8k_7b", "gemma3_1b"])
def test_a_card_whose_layers_differ_is_refused_with_how_they_do(name):
    card = CARDS[name]
    with pytest.raises(ValueError, match=f"family {card.family} differ") as refused:
        text(card, NEMO, 64 * K, Layout())
    assert card.pattern.describe() in str(refused.value)
    assert "\n" not in str(refused.value)


def test_layers_that_differ_are_named_before_a_rotation_that_another_setting_would_mend():
    with pytest.raises(ValueError, match="family olmo3 differ"):
        container(CARDS["olmo3_8k_7b"], LADDERS["olmo3_7b"], 64 * K, Layout())
