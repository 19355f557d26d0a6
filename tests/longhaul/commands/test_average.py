# SPDX-License-Identifier: Apache-2.0
"""`longhaul checkpoint average` of an import and a stage, and what it refuses first."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config import card_of, read_config
from tests.recipes.hugging_face.support.models import CONTEXT, folder
from tests.recipes.hugging_face.support.stages import untrained
from tests.recipes.hugging_face.test_parity import imported


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Return a published model, the import of twice its weights, and a stage with its weights."""
    root = tmp_path_factory.mktemp("with a blank")
    published = folder(root / "published")
    doubled = Path(shutil.copytree(published, root / "doubled"))
    weights = load_file(published / "model.safetensors")
    twice = {name: 2 * tensor for name, tensor in weights.items()}
    save_file(twice, doubled / "model.safetensors", metadata={"format": "pt"})
    imported(doubled, root / "twice")
    imported(published, root / "import")
    rope = RopeScaling.yarn(base=5_000, factor=8.0, original_length=CONTEXT)
    stage = untrained(root / "import", card_of(read_config(published), "x"), rope, root / "run")
    return published, root / "twice", stage


def test_the_mean_of_an_import_and_a_stage_is_a_stage_to_export(answer, models):
    published, start, stage = models
    code, out, err = answer(
        "checkpoint", "average", start, stage, "--to", "mean", "--share", "0.25"
    )
    assert code == 0, err
    assert out.strip() == "mean"
    assert "averaging 0.75 of" in err
    (printed,) = (line for line in err.splitlines() if line.startswith("  longhaul export"))
    code, _, err = answer(*printed.split()[1:])
    assert code == 0, err
    ours, theirs = (load_file(at / "model.safetensors") for at in (Path("mean_hf"), published))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], (0.75 * 2 + 0.25) * tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--share", "2"), "--share is 2; the weight of the second must be from 0 to 1"),
        (("--share", "nan"), "--share is nan"),
        (("--to", "."), "exists"),
    ],
    ids=str,
)
def test_what_cannot_be_averaged_is_refused_first(answer, models, words, said):
    _, start, stage = models
    assert said in answer("checkpoint", "average", start, stage, "--to", "mean", *words).error()
    assert not Path("mean").exists()


def test_a_folder_without_a_checkpoint_is_refused(answer, models, tmp_path):
    _, start, _ = models
    empty = tmp_path / "empty"
    empty.mkdir()
    told = answer("checkpoint", "average", start, empty, "--to", "mean").error()
    assert "empty has no complete checkpoint; name the folder of a trained stage" in told


def test_a_folder_that_is_not_there_is_refused_with_the_nearest_one(answer, tmp_path):
    (tmp_path / "trained").mkdir()
    (tmp_path / "file").touch()
    for command in (("export", "--to", tmp_path / "to", "--from"), ("checkpoint", "diff")):
        told = answer(*command, tmp_path / "trained1").error()
        near = f"there is no folder {tmp_path / 'trained1'} (did you mean {tmp_path / 'trained'}?)"
        assert f"{near}; name the folder of a trained stage or of an import" in told
        assert f"{tmp_path / 'file'} is a file" in answer(*command, tmp_path / "file").error()
