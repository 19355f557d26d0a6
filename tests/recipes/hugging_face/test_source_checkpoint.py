# SPDX-License-Identifier: Apache-2.0
"""What is exported is the model that was trained: other shapes, words and texts are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config import card_of, read_config
from recipes.hugging_face.export import export
from recipes.hugging_face.source_checkpoint import OF_RECIPES, trained
from tests.recipes.hugging_face.support.models import CONTEXT, folder
from tests.recipes.hugging_face.support.stages import recipe, untrained
from tests.recipes.hugging_face.test_parity import imported

YARN = RopeScaling.yarn(base=5_000, factor=8.0, original_length=CONTEXT)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return folder(tmp_path_factory.mktemp("models") / "published", "mixtral")


@pytest.fixture(scope="module")
def of_published(published) -> Path:
    """Return an import of the published model."""
    imported(published, published.with_name("imported"))
    return published.with_name("imported")


@pytest.fixture
def stage(published, of_published, tmp_path) -> Path:
    """Return the folder of a stage that began with the import."""
    card = card_of(read_config(published), "published")
    return untrained(of_published, card, YARN, tmp_path / "run")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}, "heads is 3 where"),
        ({"rms_norm_eps": 0.01}, "norm_epsilon is 0.01 where the import has"),
        ({"rope_theta": 1e6}, "native_rope is .*1000000"),
        ({"max_position_embeddings": 128}, "native_context is 128"),
    ],
)
def test_a_folder_that_an_import_is_said_to_be_like_is_compared(
    published, of_published, tmp_path, fields, said
):
    like = Path(shutil.copytree(published, tmp_path / "like"))
    config = json.loads((like / "config.json").read_text())
    (like / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=said):
        trained(of_published, like)
    assert trained(of_published, published).like == published


@pytest.mark.parametrize("of", ["stage", "import"])
def test_a_folder_with_another_tokenizer_is_refused(published, of_published, stage, tmp_path, of):
    from data.tokenization.tokenizer import train

    like = Path(shutil.copytree(published, tmp_path / "like"))
    source = stage if of == "stage" else of_published
    export(trained(source, like), tmp_path / "same")
    train(["completely other words zq zq zq"], 270).save(like)
    with pytest.raises(ValueError, match="another tokenizer"):
        export(trained(source, like), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "family", ["llama", "mixtral", "qwen3", "qwen3_moe", "nemotron", "olmo3", "gemma3"]
)
@pytest.mark.parametrize("device", [{}, {"device": "cuda", "precision": "bf16"}])
def test_recipes_write_no_field_that_export_does_not_know(tmp_path, family, device):
    assert _written(tmp_path, family, device) <= OF_RECIPES


def test_export_knows_no_field_that_no_recipe_writes(tmp_path):
    written = [_written(tmp_path, family, {}) for family in ("llama", "mixtral", "gemma3")]
    assert set().union(*written) == OF_RECIPES


def _written(to: Path, family: str, sizes: dict[str, str]) -> set[str]:
    """Return the fields of the model's config in a resolved recipe."""
    from recipes.resolved import yaml_file

    card = card_of(read_config(folder(to / family, family)), family)
    yaml_file.write(recipe(card, card.native_rope, to / "run", to, **sizes), to / "config.yaml")
    return set(yaml.safe_load((to / "config.yaml").read_text())["model"]["config"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_topk_scaling_factor", 2.5),
        ("no_rope_freq", [1, 0]),
        ("rotary_interleaved", True),
        ("activation_func_clamp_value", 1.0),
        ("softmax_type", "off-by-one"),
        ("position_embedding_type", "none"),
        ("rotary_percent", 0.5),
    ],
)
def test_a_stage_with_a_field_of_no_recipe_is_refused_by_its_name(stage, name, value):
    resolved = yaml.safe_load((stage / "config.yaml").read_text())
    assert trained(stage).card.layers == 2
    resolved["model"]["config"][name] = value
    (stage / "config.yaml").write_text(yaml.safe_dump(resolved))
    with pytest.raises(ValueError, match=f"sets model.config.{name}, which no recipe"):
        trained(stage)


def test_a_stage_trained_with_another_dropout_is_exported(stage):
    resolved = yaml.safe_load((stage / "config.yaml").read_text())
    resolved["model"]["config"]["hidden_dropout"] = 0.1
    (stage / "config.yaml").write_text(yaml.safe_dump(resolved))
    assert trained(stage).card.layers == 2


def test_a_number_that_a_dtype_does_not_reach_is_not_made_infinite(published, tmp_path):
    source = Path(shutil.copytree(published, tmp_path / "published"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][:3] = torch.tensor([1e5, float("inf"), 1.0])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    imported(source, tmp_path / "imported")
    found = trained(tmp_path / "imported")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has 100000, beyond the 65504"):
        export(found, tmp_path / "half", dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "published"]
    export(found, tmp_path / "brain", dtype=torch.bfloat16)
    there = load_file(tmp_path / "brain" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(there, tensors["model.norm.weight"].bfloat16())
