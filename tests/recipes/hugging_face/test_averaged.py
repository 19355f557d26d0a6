# SPDX-License-Identifier: Apache-2.0
"""A mean of two checkpoints is exported, loaded and begun from as what it is a mean of."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from custom_modules.rope.config import RopeScaling
from recipes.checkpoints.average import average
from recipes.checkpoints.marker import start_checkpoint
from recipes.hugging_face.config import card_of, read_config
from recipes.hugging_face.export import export
from recipes.hugging_face.source_checkpoint import trained
from tests.recipes.hugging_face.support.models import CONTEXT, folder
from tests.recipes.hugging_face.support.stages import LENGTH, recipe, untrained
from tests.recipes.hugging_face.test_parity import imported

YARN = RopeScaling.yarn(base=5_000, factor=8.0, original_length=CONTEXT)


@pytest.fixture(scope="module")
def imports(tmp_path_factory) -> tuple[Path, Path]:
    """Return imports of two models of one shape, the second with all weights doubled."""
    models = tmp_path_factory.mktemp("models")
    first = folder(models / "first")
    second = Path(shutil.copytree(first, models / "second"))
    doubled = {name: 2 * tensor for name, tensor in load_file(first / "model.safetensors").items()}
    save_file(doubled, second / "model.safetensors", metadata={"format": "pt"})
    for source in (first, second):
        imported(source, models / f"{source.name} imported")
    return models / "first imported", models / "second imported"


def weights(exported: Path) -> dict[str, torch.Tensor]:
    return load_file(exported / "model.safetensors")


def require_scaled(found: Path, published: Path, factor: float) -> None:
    ours, theirs = weights(found), weights(published)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], factor * tensor, rtol=1e-6, atol=0)


def test_the_mean_of_an_import_and_a_stage_is_exported_and_finds_the_import(imports, tmp_path):
    first, second = imports
    published = second.parent / "first"
    card = card_of(read_config(published), "published")
    stage = untrained(second, card, YARN, tmp_path / "run")
    mean = tmp_path / "run" / "stages" / "mean"
    average((first, stage / "checkpoints" / "step=5"), mean)
    found = trained(mean)
    assert (found.rope, found.length) == (YARN, LENGTH)
    assert found.like == second / "hugging_face"
    export(found, tmp_path / "exported")
    require_scaled(tmp_path / "exported", published, 1.5)
    assert read_config(tmp_path / "exported")["rope_scaling"]["rope_type"] == "yarn"


def test_a_stage_that_began_with_the_mean_finds_the_import(imports, tmp_path):
    from recipes.resolved import yaml_file

    first, second = imports
    card = card_of(read_config(first.parent / "first"), "published")
    stage = untrained(second, card, YARN, tmp_path / "run")
    mean = tmp_path / "run" / "stages" / "mean"
    average((first, stage / "checkpoints" / "step=5"), mean)
    begun = start_checkpoint(mean / "checkpoints")
    after = tmp_path / "after" / "stages" / "next"
    shutil.copytree(begun, after / "checkpoints" / "step=5")
    made = recipe(card, YARN, tmp_path / "after", mean / "checkpoints")
    yaml_file.write(made, after / "config.yaml")
    assert trained(after).like == second / "hugging_face"


def test_the_mean_of_two_imports_is_an_import(imports, tmp_path):
    first, second = imports
    average((first, second), tmp_path / "mean", share=0.25)
    assert start_checkpoint(tmp_path / "mean") == tmp_path / "mean"
    found = trained(tmp_path / "mean")
    assert found.like == tmp_path / "mean" / "hugging_face"
    assert found.length == CONTEXT
    export(found, tmp_path / "exported")
    require_scaled(tmp_path / "exported", first.parent / "first", 1.25)


def test_the_mean_is_loaded_for_evaluation(imports, tmp_path, megatron_rank):
    from eval import load_model

    first, second = imports
    card = card_of(read_config(first.parent / "first"), "published")
    stage = untrained(second, card, YARN, tmp_path / "run")
    average((first, stage / "checkpoints" / "step=5"), tmp_path / "mean")
    model = load_model.load(tmp_path / "mean", seq_length=LENGTH)
    published = weights(first.parent / "first")["model.norm.weight"]
    torch.testing.assert_close(model.decoder.final_layernorm.weight, 1.5 * published)
