# SPDX-License-Identifier: Apache-2.0
"""A rotation that a file holds is the one that was written to it."""

import json
from pathlib import Path

import pytest
import torch

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies
from recipes.notation import rope_file

SIZES = {"base": 10_000, "factor": 4.0, "original_length": 512}
FOUND = RopeScaling(
    method="longrope",
    **SIZES,
    short_factor=[1.0] * 16,
    long_factor=[1 + i / 3 for i in range(16)],
    attention_factor=1.1,
)
TWICE = RopeScaling.yarn(
    base=10_000, factor=2.0, original_length=2048, before=RopeScaling.yarn(**SIZES)
)


def _file(folder: Path, content: object) -> Path:
    path = folder / "rope.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def _ours(**changed: object) -> dict:
    return {"format": "longhaul rope", "version": 1, "rope": FOUND.to_dict(), **changed}


@pytest.mark.parametrize("rope", [FOUND, TWICE, RopeScaling.base_change(500_000)])
def test_a_rotation_comes_back_as_it_was_written(tmp_path, rope):
    path = tmp_path / "found" / "rope.json"
    rope_file.write(path, rope, {"score": 1.5})
    assert rope_file.read(path) == rope
    content = json.loads(path.read_text())
    assert content["format"] == "longhaul rope"
    assert content["about"] == {"score": 1.5}
    assert [entry.name for entry in path.parent.iterdir()] == ["rope.json"]


def test_a_write_that_fails_leaves_the_file_before_as_it_was(tmp_path):
    path = tmp_path / "rope.json"
    rope_file.write(path, FOUND, {})
    with pytest.raises(ValueError, match="JSON"):
        rope_file.write(path, TWICE, {"score": float("nan")})
    assert rope_file.read(path) == FOUND
    assert [entry.name for entry in tmp_path.iterdir()] == ["rope.json"]


def test_a_config_of_hugging_face_turns_heads_as_transformers_does(tmp_path):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_theta=50_000.0,
        rope_scaling=scaling,
    )
    config.save_pretrained(tmp_path)
    found = rope_file.read(tmp_path / "config.json")
    theirs = LlamaRotaryEmbedding(config)
    ours, temperature = inverse_frequencies(found, 32)
    torch.testing.assert_close(ours.float(), theirs.inv_freq)
    assert temperature == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds list"),
        ({"hidden_size": 128}, "neither a file of format 'longhaul rope'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "moon"}}, "'moon'"),
        (_ours(format="another"), "its format is 'another'"),
        (_ours(version=2), "its version is 2 and this Longhaul reads 1"),
        (_ours(rope=None), "has no rope"),
        (_ours(rope={**FOUND.to_dict(), "factr": 4}), "has no 'factr'"),
        (_ours(rope={**FOUND.to_dict(), "factor": "four"}), "factor is 'four'; it takes a number"),
        (_ours(rope={"base": 10_000}), "needs method"),
    ],
    ids=str,
)
def test_a_file_that_holds_no_rotation_is_refused_by_its_path(tmp_path, content, said):
    path = _file(tmp_path, content)
    with pytest.raises(ValueError, match=said) as refused:
        rope_file.read(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read: no such file"):
        rope_file.read(tmp_path / "nowhere.json")
