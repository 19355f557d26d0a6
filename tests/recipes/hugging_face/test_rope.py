# SPDX-License-Identifier: Apache-2.0
"""A rotation in config.json: what transformers turns heads by, and what comes back."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import Rotation, rotary_dims, stated_rotation
from recipes.checkpoints.rotation import RotationError
from recipes.hugging_face.as_computed import require_as_computed
from recipes.hugging_face.positions import rotation_notes
from recipes.hugging_face.rope import RECORD, rope_fields, rope_of

HEAD_DIM, LENGTH = 32, 2048
SIZES = {"base": 10_000, "factor": 4.0, "original_length": 512}
LLAMA3 = RopeScaling.llama3(**SIZES)
ROTATIONS = {
    "default": RopeScaling.base_change(500_000),
    "linear": RopeScaling.linear(**SIZES),
    "ntk": RopeScaling.ntk(**SIZES),
    "dynamic": RopeScaling.dynamic(**SIZES),
    "ntk_by_parts": RopeScaling.ntk_by_parts(**SIZES),
    "yarn": RopeScaling.yarn(**SIZES),
    "yarn, betas": RopeScaling(method="yarn", beta_fast=16.0, beta_slow=2.0, **SIZES),
    "yarn, no truncation": RopeScaling(method="yarn", truncate=False, **SIZES),
    "yarn, temperature": RopeScaling(method="yarn", attention_factor=1.25, **SIZES),
    "yarn, mscales": RopeScaling(method="yarn", mscale=0.7, mscale_all_dim=1.3, **SIZES),
    "yarn, mscales 1": RopeScaling(method="yarn", mscale=1.0, mscale_all_dim=1.0, **SIZES),
    "yarn, one mscale": RopeScaling(method="yarn", mscale=0.7, **SIZES),
    "llama3": LLAMA3,
    "longrope": RopeScaling(
        method="longrope", **SIZES, short_factor=[1 + i / 64 for i in range(16)],
        long_factor=[1 + i / 4 for i in range(16)],
    ),
    "longrope, temperature": RopeScaling(
        method="longrope", **SIZES, short_factor=[1.0] * 16, attention_factor=1.1,
        long_factor=[1 + i / 4 for i in range(16)],
    ),
    "yarn on llama3": RopeScaling.yarn(
        base=10_000, factor=2.0, original_length=2048, before=LLAMA3
    ),
    "ntk on linear": replace(RopeScaling.ntk(**SIZES), before=RopeScaling.linear(**SIZES)),
    "linear on plain": replace(
        RopeScaling.linear(**SIZES), before=RopeScaling.base_change(10_000)
    ),
    "yarn, half of each head": replace(RopeScaling.yarn(**SIZES), partial_rotary_factor=0.5),
    "ntk, half of each head": replace(RopeScaling.ntk(**SIZES), partial_rotary_factor=0.5),
}  # fmt: skip
EVERY = pytest.mark.parametrize("rope", ROTATIONS.values(), ids=ROTATIONS)


def exported(rope: RopeScaling, length: int = LENGTH) -> dict:
    """Return config.json as it is read back from disk."""
    fields = rope_fields(rope, head_dim=HEAD_DIM, length=length)
    shape = {"head_dim": HEAD_DIM, "hidden_size": 128, "num_attention_heads": 4}
    return json.loads(json.dumps({"model_type": "llama", **shape, **fields}))


@EVERY
@pytest.mark.parametrize("length", [100, 512, 513, LENGTH])
def test_transformers_turns_heads_as_training_did(rope, length):
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(exported(rope)))
    positions = torch.arange(length)[None]
    cos, sin = theirs(torch.zeros(1, length, 8), positions)
    half = rotary_dims(rope, HEAD_DIM) // 2
    ours = Rotation(rope, HEAD_DIM).table(positions, length)[:, :, 0, 0]
    # fp32 angles of transformers: 1e-7 of 2,048 radians.
    torch.testing.assert_close(ours[0], cos[0, :, :half], rtol=0, atol=5e-4)
    torch.testing.assert_close(ours[1], sin[0, :, :half], rtol=0, atol=5e-4)


@EVERY
def test_what_transformers_computes_for_an_export_is_what_was_trained(rope, tmp_path):
    config = exported(rope)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for length in (512, LENGTH):
        trained = stated_rotation(rope, HEAD_DIM, length)
        require_as_computed(tmp_path, trained, length)
        slower = replace(trained, frequencies=(*trained.frequencies[:-1], 1e-6))
        with pytest.raises(RotationError, match="would rotate otherwise than the checkpoint was"):
            require_as_computed(tmp_path, slower, length)


@EVERY
def test_a_rotation_comes_back_as_it_went(rope):
    assert rope_of(exported(rope)) == rope


@EVERY
def test_a_rotation_comes_back_from_what_others_read_with_the_same_table(rope):
    config = exported(rope)
    del config[RECORD]
    again = rope_of(config)
    positions = torch.tensor([[0, 1, 511, 512, 2047]])
    for length in (512, LENGTH):
        before = Rotation(rope, HEAD_DIM).table(positions, length)
        after = Rotation(again, HEAD_DIM).table(positions, length)
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@EVERY
def test_the_file_outranks_a_record_that_says_something_else(rope):
    config = exported(rope)
    config["rope_theta"], config["rope_scaling"] = 77_000.0, None
    for key in ("rope_parameters", "partial_rotary_factor"):
        config.pop(key, None)
    assert rope_of(config) == RopeScaling.base_change(77_000)


def test_the_temperature_is_always_written():
    for name, rope in ROTATIONS.items():
        scaling = exported(rope)["rope_scaling"]
        if scaling and scaling["rope_type"] in ("yarn", "longrope"):
            assert scaling["attention_factor"] == rope.temperature, name


def test_the_new_length_is_the_largest_position_wherever_that_is_not_the_original_one():
    for name, rope in ROTATIONS.items():
        config = exported(rope, length=1500)
        by_factor = name in ("linear", "dynamic", "linear on plain")
        assert config["max_position_embeddings"] == (512 if by_factor else 1500), name


PUBLISHED = {
    "Llama-2": ({"max_position_embeddings": 4096}, RopeScaling.base_change(10_000)),
    "Mixtral without a base": ({"model_type": "mixtral"}, RopeScaling.base_change(1_000_000)),
    "Llama-3.1": (
        {
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        RopeScaling.llama3(),
    ),
    "Qwen2.5 with YaRN, by its old key": (
        {
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": 32_768,
            "rope_scaling": {
                "factor": 4.0, "original_max_position_embeddings": 32_768, "type": "yarn",
            },
        },
        RopeScaling.yarn(base=1_000_000, factor=4.0, original_length=32_768),
    ),
    "YaRN from the length that stands at the top": (
        {
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0,
            },
        },
        RopeScaling(method="yarn", base=10_000, factor=2.0, original_length=4096, mscale=1.0),
    ),
    "Vicuna 16K": (
        {
            "max_position_embeddings": 4096,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
        },
        RopeScaling.linear(base=10_000, factor=4.0, original_length=4096),
    ),
    "Phi-3 128K": (
        {
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "su", "short_factor": [1.0, 1.1], "long_factor": [1.0, 20.0],
            },
        },
        RopeScaling(
            method="longrope", base=10_000, factor=32.0, original_length=4096,
            short_factor=[1.0, 1.1], long_factor=[1.0, 20.0],
        ),
    ),
    "as transformers 5 writes it": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5,
                             "original_max_position_embeddings": 1024}},
        RopeScaling.linear(base=500_000, factor=2.0, original_length=1024),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "rope"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read(config, rope):
    assert rope_of(config) == rope


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type 'mrope', which is not known"),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
            "rope_type 'yarn' and type 'linear', and models differ in which of them",
        ),
        ({"rope_scaling": {"type": "yarn", "beta": 3}}, "has beta, which rope_type yarn"),
        (
            {"rope_scaling": {"rope_type": "linear"}, "max_position_embeddings": 8},
            "no factor, which rope_type linear needs",
        ),
        ({"rope_scaling": [1]}, r"has rope_scaling \[1\]; it is an object"),
        ({"rope_theta": "10000.0"}, "has rope_theta '10000.0'; it is a number above 0"),
        ({"rope_theta": 5.0, "rope_scaling": {"rope_theta": 7}}, "rope_theta 5.0 and in rope_sc"),
        (
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
            },
            "rope_scaling and rope_parameters, and rope_type differs",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                },
                "original_max_position_embeddings": 128,
            },
            "original_max_position_embeddings 128 and in rope_scaling 64",
        ),
        (
            {
                "max_position_embeddings": 8,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": 1,
                    "long_factor": [2],
                },
            },
            "has short_factor 1; it is a list of numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "neither original_max_position_embeddings nor max_position_embeddings",
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 1024,
                },
            },
            "1024 and transformers computes rope_type dynamic from .* 4,096",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}, "max_position_embeddings": 8},
            "factor is 0.5",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rotation_that_is_not_known_or_says_two_things_is_named(config, words):
    with pytest.raises(ValueError, match=words):
        rope_of(config)


def test_interleaved_pairs_have_no_config():
    with pytest.raises(ValueError, match="interleaved"):
        rope_fields(replace(ROTATIONS["yarn"], interleaved=True), head_dim=HEAD_DIM, length=8)


def test_the_part_that_rotates_is_stated_wherever_a_library_may_have_another_default():
    half = replace(ROTATIONS["ntk"], partial_rotary_factor=0.5)
    for rope, stated in ((half, 0.5), (ROTATIONS["ntk"], 1.0)):
        config = rope_fields(rope, head_dim=HEAD_DIM, length=LENGTH, rotated=0.5)
        config |= {"head_dim": HEAD_DIM}
        assert config.get("partial_rotary_factor") == stated
        assert rope_of(json.loads(json.dumps(config)), rotated=0.5) == rope


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ({"max_position_embeddings": 4096}, False),
        ({"rope_theta": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"rope_theta": 10_000.0}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, True),
        ({"rope_parameters": {"full_attention": {"rope_theta": 10_000.0}}}, True),
    ],
)
def test_a_base_that_a_config_does_not_state_is_told(config, states):
    notes = rotation_notes(config | {"model_type": "llama"}, ROTATIONS["default"])
    said = [note for note in notes if "states no rope_theta; the base is that of" in note]
    assert len(said) == (not states)
