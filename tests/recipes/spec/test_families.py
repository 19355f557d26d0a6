# SPDX-License-Identifier: Apache-2.0
"""Each family against transformers and NeMo, and as the model that a recipe of it builds."""

import dataclasses
import importlib
from typing import Any

import fiddle as fdl
import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from custom_modules.memory.config import Tiling
from custom_modules.rope.config import RopeScaling
from recipes.models import TINY
from recipes.nemo2.cpu import plain_kernels
from recipes.nemo2.model import LongContextMixin
from recipes.pretrain import config_class, model_config, pretrain
from recipes.spec.families import FAMILIES
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Cosine, Ladder, Stage

OWN = {
    "mistral": {"window_size", "cp_comm_type"},
    "gemma3": {
        "qk_layernorm", "layernorm_zero_centered_gamma", "activation_func",
        "bias_activation_fusion",
    },
}  # fmt: skip
"""Fields by which our configs of families differ from NeMo's config that they build on."""
WITH_EXPERTS = [family.name for family in FAMILIES.values() if family.experts]
EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def card(name: str, **changed: Any) -> ModelCard:
    """Return a small card of a family."""
    experts = {"experts": 4, "experts_per_token": 2} if FAMILIES[name].experts else {}
    rotated = 0.5 if name == "nemotron" else 1.0
    native = RopeScaling(method="default", base=10_000, partial_rotary_factor=rotated)
    fields: dict[str, Any] = {
        "family": name,
        "native_rope": native,
        "tied_embeddings": False,
        **experts,
    }
    return dataclasses.replace(TINY, **(fields | changed))


def stage(rope: Any = "native") -> Stage:
    return Stage(
        seq_length=512,
        rope=rope,
        tokens=2**14,
        tokens_per_batch=2048,
        lr=Cosine(peak=1e-3),
        start="scratch",
    )


def built(of: ModelCard) -> Any:
    """Return the NeMo config of a recipe on CPU."""
    config = model_config(of, stage(), Layout(precision="fp32", device="cpu"))
    plain_kernels(config)
    return fdl.build(config)


def found(dotted_name: str) -> Any:
    module, _, name = dotted_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def squares_a_relu(function: Any) -> bool:
    t = torch.linspace(-2, 2, 9)
    return torch.equal(function(t), t.relu() ** 2)


def is_activation(function: Any, name: str) -> bool:
    """Tell whether a function is the one that transformers has by this name."""
    t = torch.linspace(-2, 2, 9, dtype=torch.float64)
    return torch.allclose(function(t), ACT2FN[name](t))


@EACH
def test_a_family_states_what_transformers_does(family):
    theirs = getattr(transformers, family.architecture).config_class()
    assert theirs.model_type == family.model_type
    field = "hidden_activation" if family.name == "gemma3" else "hidden_act"
    assert getattr(theirs, field) == family.activation
    assert squares_a_relu(ACT2FN[family.activation]) == (family.activation == "relu2")
    assert ("num_experts_per_tok" in theirs.to_dict()) == family.experts
    assert hasattr(theirs, "norm_eps") == (family.normalization == "LayerNorm")


@EACH
def test_a_family_states_what_nemo_does(family):
    # Families that NeMo has no config for are built on Llama's.
    of = config_class(family) if family.name in ("olmo3", "gemma3") else found(family.nemo_config)
    nemo = {field.name: field.default for field in dataclasses.fields(of)}
    assert nemo["normalization"] == family.normalization
    assert nemo["layernorm_zero_centered_gamma"] == family.zero_centered
    assert nemo["gated_linear_unit"] == family.gated
    assert nemo["add_qkv_bias"] == family.qkv_bias
    assert nemo["qk_layernorm"] == (family.qk_norm and not family.wide_qk_norm)  # that is ours
    assert bool(nemo["num_moe_experts"]) == family.experts
    assert not nemo["add_bias_linear"]
    assert is_activation(nemo["activation_func"], family.activation)


@EACH
def test_our_config_is_nemos_with_our_model(family):
    ours = config_class(family)
    assert issubclass(ours, LongContextMixin)
    assert issubclass(ours, found(family.nemo_config))
    departed = {
        field.name
        for field in dataclasses.fields(found(family.nemo_config))
        if getattr(ours, field.name, None) != getattr(found(family.nemo_config), field.name, None)
    }
    assert departed - OWN.get(family.name, set()) <= {
        "position_embedding_type",
        "calculate_per_token_loss",
        "forward_step_fn",
    }


@EACH
@pytest.mark.usefixtures("megatron_rank")
def test_the_model_of_a_recipe_has_the_matrices_its_card_counts(family):
    of = card(family.name)
    model = built(of).configure_model(tokenizer=None)
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    sizes.pop("embedding.word_embeddings.weight")
    idle = sum(
        size
        for name, size in sizes.items()
        if any(f"experts.{index}." in name for index in range(of.experts_per_token, of.experts))
    )
    assert sum(sizes.values()) - idle == of.matmul_parameters
    assert sum(p.numel() for p in model.parameters()) == of.parameters
    names = {name.rpartition("layers.0.")[2] for name, _ in model.named_parameters()}
    assert ("self_attention.linear_qkv.bias" in names) == family.qkv_bias
    assert ("self_attention.q_layernorm.weight" in names) == family.qk_norm
    assert ("pre_mlp_layernorm.bias" in names) == (family.normalization == "LayerNorm")
    assert ("mlp.router.weight" in names) == family.experts


@EACH
def test_a_recipe_of_a_family_holds_to_every_law_on_gpus_and_on_cpu(family):
    of, ladder = card(family.name), Ladder(name="tiny", source="a test", stages=(stage(),))
    for layout in (
        Layout(tp=2, cp=ContextParallel.ulysses(2)),
        Layout(cp=ContextParallel.ring(2), precision="fp32", device="cpu"),
    ):
        recipe = pretrain(of, ladder, 512, layout)
        assert fdl.get_callable(recipe.model.config) is config_class(family)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_of_a_recipe_are_those_of_its_card(name):
    config = built(card(name, experts=6, experts_per_token=3))
    assert (config.num_moe_experts, config.moe_router_topk) == (6, 3)
    assert config.moe_ffn_hidden_size == TINY.ffn_hidden


def test_a_rotation_over_another_part_of_the_head_than_the_models_is_refused():
    whole = RopeScaling.base_change(1e6)
    with pytest.raises(ValueError, match=r"partial_rotary_factor of the stage.* 1\.0 .* 0\.5"):
        model_config(card("nemotron"), stage(whole), Layout(precision="fp32", device="cpu"))


@pytest.mark.parametrize(
    "layout",
    [Layout(tiling=Tiling(mlp=True)), Layout(fp8=Fp8(recipe="tensorwise"))],
    ids=["tiles", "fp8"],
)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_what_experts_do_not_compute_in_is_refused(name, layout):
    ladder = Ladder(name="tiny", source="a test", stages=(stage(),))
    with pytest.raises(ValueError, match="the model has experts, which support neither a tiled"):
        pretrain(card(name), ladder, 512, layout)


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("llama", {"family": "gemma"}, "family 'gemma' is unknown; there are llama, qwen2"),
        (
            "llama",
            {"experts": 8},
            "family llama has none; leave both 0, or take mixtral or qwen3_moe",
        ),
        ("mixtral", {"experts": 0}, "2 experts per token of 0"),
        ("mixtral", {"experts_per_token": 5}, "5 experts per token of 4"),
    ],
    ids=["family", "no experts", "none", "too many"],
)
def test_a_card_of_no_family_is_refused(name, changed, words):
    with pytest.raises(ValueError, match=words):
        card(name, **changed)


def test_matmul_parameters_of_experts_and_of_an_mlp_without_gate_are_the_sums_by_hand():
    # 2 layers of attention 128 * 32 * (4 + 2 + 2 + 4), a head of 128 * 512; an MLP matrix has
    # 128 * 384 weights, a router 128 * 4.
    rest, matrix = 2 * 128 * 32 * 12 + 128 * 512, 128 * 384
    assert card("llama").matmul_parameters == rest + 2 * 3 * matrix
    assert card("nemotron").matmul_parameters == rest + 2 * 2 * matrix
    assert card("mixtral").matmul_parameters == rest + 2 * (2 * 3 * matrix + 128 * 4)


def test_parameters_of_each_family_are_the_sums_by_hand():
    # 2 layers of attention, embedding and head of 128 * 512; 5 norms of 128; a query, key or value
    # of all heads has 128 + 2 * 64 rows.
    rest, matrix = 2 * 128 * 32 * 12 + 2 * 128 * 512, 128 * 384
    dense = rest + 2 * 3 * matrix + 5 * 128
    moe = rest + 2 * (4 * 3 * matrix + 128 * 4) + 5 * 128
    assert card("llama").parameters == card("mistral").parameters == dense
    assert card("llama", tied_embeddings=True).parameters == dense - 128 * 512
    assert card("qwen2").parameters == dense + 2 * (128 + 2 * 64)
    assert card("qwen3").parameters == dense + 2 * 2 * 32
    assert card("mixtral").parameters == moe
    assert card("qwen3_moe").parameters == moe + 2 * 2 * 32
    assert card("nemotron").parameters == rest + 2 * 2 * matrix + 5 * 2 * 128
