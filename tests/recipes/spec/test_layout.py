# SPDX-License-Identifier: Apache-2.0
"""What the choices of a Layout become in the resolved tree."""

import fiddle as fdl
import nemo_run as run
import pytest
from nemo_run.cli.cli_parser import parse_cli_args

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.ladders import NEMO
from recipes.models import LLAMA32_1B
from recipes.nemo2.cpu import on_cpu
from recipes.nemo2.settings import as_config_node
from recipes.pretrain import pretrain
from recipes.resolved.check import check, notes
from recipes.resolved.read import fp8, sharding_of
from recipes.shipped.factories import FACTORIES
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.units import K


def laid_out(**layout) -> run.Partial:
    """Return the recipe of a stage whose batch is 16 sequences of 16K tokens, for 8 GPUs."""
    return pretrain(LLAMA32_1B, NEMO, 16 * K, Layout(**{"dp": 8, **layout}))


def test_a_layout_reaches_the_tree_where_overrides_reach_it():
    recipe = laid_out(
        recompute=Recompute(kind="selective", modules=["core_attn"]),
        tiling=Tiling(loss=True),
        sharding="none",
    )
    words = ["model.config.recompute.kind=kept_attention", "model.config.recompute.every=2",
             "model.config.tiling.mlp=true", "model.config.tiling.loss_tile=512",
             "model.config.offload.tensors=both", "model.config.offload.cap_gib=16"]  # fmt: skip
    changed = parse_cli_args(recipe, words).model.config
    changed.recompute.modules = []
    assert fdl.build(changed.recompute) == Recompute(kind="kept_attention", every=2, modules=[])
    assert fdl.build(changed.tiling) == Tiling(loss=True, loss_tile=512, mlp=True)
    assert fdl.build(changed.offload) == Offload(tensors="both", cap_gib=16)


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("kind", ["selective", "uniform", "block", "kept_attention"])
def test_megatron_gets_its_own_kinds_of_recompute_alone(kind):
    recipe = FACTORIES["tiny_8k"]()
    recompute = Recompute(kind=kind, modules=["mlp"] if kind == "selective" else [])
    recipe.model.config.recompute = as_config_node(recompute)
    check(recipe)
    built = fdl.build(recipe.model.config)
    settings = recompute.megatron_settings()
    default = ["core_attn"]  # Megatron's own, where none are given
    assert built.recompute_modules == settings.pop("recompute_modules") or default
    assert {name: getattr(built, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("sharding", "fsdp", "distributed"),
    [
        ("none", None, False),
        ("optimizer", None, True),
        ("gradients", "megatron", True),
        ("parameters", "megatron", True),
    ],
)
def test_a_layout_shards_by_the_means_of_megatron(sharding, fsdp, distributed):
    recipe = laid_out(sharding=sharding)
    assert recipe.trainer.strategy.fsdp == fsdp
    assert recipe.optim.config.use_distributed_optimizer == distributed
    assert sharding_of(recipe) == sharding


def test_fsdp_without_what_it_takes_is_refused():
    recipe = laid_out(sharding="parameters")
    recipe.trainer.strategy.ddp.overlap_grad_reduce = False
    with pytest.raises(ValueError, match="overlap_grad_reduce is False, and Megatron FSDP takes T"):
        check(recipe)


def test_gathering_what_no_rank_shards_is_refused():
    recipe = laid_out(sharding="none")
    recipe.trainer.strategy.ddp.overlap_param_gather = True
    with pytest.raises(ValueError, match="overlap_param_gather has no effect without"):
        check(recipe)


def test_an_offloaded_optimizer_is_the_device_s_again_on_cpu():
    recipe = laid_out(optimizer_offload=0.5)
    assert recipe.optim.config.optimizer_offload_fraction == 0.5
    on_cpu(recipe)
    assert not recipe.optim.config.optimizer_cpu_offload


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"fp8": Fp8(recipe="delayed", bf16_first=1)}, "fp8 delayed with bf16_first 1"),
        ({"sharding": "parameters", "pp": 2, "dp": 4}, "lays ranks out as DP x TP, but PP is 2"),
        ({"optimizer_offload": 1.5}, "optimizer_offload is 1.5; it is a fraction, 0 to 1"),
        ({"device": "cpu", "sharding": "gradients"}, "take sharding none or optimizer"),
        (
            {
                "recompute": Recompute(kind="full"),
                "offload": Offload(tensors="inputs", cap_gib=1),
                "cp": ContextParallel.ring(2),
                "pp": 2,
                "dp": 2,
            },
            # 8 layers x 8,192 tokens x 2,048 numbers of 2 bytes, of 2 micro-batches
            r"needs 0\.5 GiB .*8 layers, 2 micro-batches .* cap_gib is 0\.25",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_layout_that_breaks_a_law_is_refused(layout, words):
    if "offload" in layout:
        laid_out(**layout)
        layout = {**layout, "offload": Offload(tensors="inputs", cap_gib=0.25)}
    with pytest.raises(ValueError, match=words):
        laid_out(**layout)


def test_fp8_reaches_nemo_s_precision_plugin():
    chosen = Fp8(recipe="tensorwise", bf16_first=1, bf16_last=2)
    recipe = laid_out(fp8=chosen)
    assert fp8(recipe) == chosen
    plugin = fdl.build(recipe.trainer.plugins).dtype_config
    assert (plugin.fp8, plugin.fp8_recipe) == ("hybrid", "tensorwise")
    assert plugin.first_last_layers_bf16
    assert (plugin.num_layers_at_start_in_bf16, plugin.num_layers_at_end_in_bf16) == (1, 2)


def test_a_tile_above_a_rank_s_tokens_is_noted_and_no_error():
    (note,) = notes(laid_out(tiling=Tiling(loss=True, loss_tile=32 * K)))
    assert "loss_tile is 32,768 tokens and a rank has 16,384" in note


def test_a_config_s_own_recompute_is_refused_and_not_dropped():
    node = FACTORIES["tiny_8k"]().model.config
    node.recompute_granularity, node.recompute_method = "full", "uniform"
    node.recompute_num_layers = 1
    with pytest.raises(ValueError, match="recompute_granularity is 'full' and recompute is none"):
        fdl.build(node)
