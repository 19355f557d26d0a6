# SPDX-License-Identifier: Apache-2.0
"""A rotation from a stage to its recipe, its checkpoint, its resume, Hugging Face, and back."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fiddle as fdl
import pytest
import torch

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import Rotation
from longhaul.jobs import records, stage_checks
from recipes.checkpoints.marker import checkpoint_facts
from recipes.hugging_face.config import card_of, exported_config
from recipes.models import TINY
from recipes.nemo2 import checkpoint_callback
from recipes.nemo2.settings import place
from recipes.notation import rope_file
from recipes.pretrain import pretrain
from recipes.resolved import read as resolved_read
from recipes.resolved import yaml_file
from recipes.resolved.stage import ResolvedStage
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.stage import Cosine, Ladder, Stage

SIZES = {"base": 10_000, "factor": 4.0, "original_length": 512}
LISTS = {"short_factor": [1.0] * 16, "long_factor": [1 + at / 7 for at in range(16)]}
ROTATIONS = {
    "default": RopeScaling.base_change(640_000.5),
    "linear": RopeScaling.linear(**SIZES),
    "ntk": RopeScaling.ntk(**SIZES),
    "dynamic": RopeScaling.dynamic(**SIZES),
    "ntk_by_parts": RopeScaling.ntk_by_parts(**SIZES),
    "yarn": RopeScaling(
        method="yarn", **SIZES, beta_fast=16.0, truncate=False, mscale=0.7, mscale_all_dim=1.3
    ),
    "llama3": RopeScaling.llama3(**SIZES),
    "longrope": RopeScaling(method="longrope", **SIZES, **LISTS, attention_factor=1.1),
    "yarn on llama3": replace(RopeScaling.yarn(**SIZES), before=RopeScaling.llama3(**SIZES)),
}


def recipe(rope: RopeScaling, folder: Path):
    """Return the recipe of a stage of 2,048 tokens in a folder."""
    stage = Stage(
        seq_length=2048, rope=rope, tokens=8192, tokens_per_batch=8192, lr=Cosine(peak=1e-3),
        start="scratch",
    )  # fmt: skip
    ladder = Ladder(name="tiny", source="a test", stages=(stage,))
    layout = Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu")
    made = pretrain(TINY, ladder, 2048, layout)
    place(made, TINY, ladder, stage, run_to=folder, store=folder / "store")
    return made


def _trainer(made, rope: RopeScaling) -> SimpleNamespace:
    """Return what a checkpoint's marker is written from."""
    config = SimpleNamespace(
        seq_length=made.data.seq_length,
        rope=rope,
        pattern=None,
        vocab_size=made.model.config.vocab_size,
    )
    tokenizer = SimpleNamespace(fingerprint="of a tokenizer", eod_id=0)
    return SimpleNamespace(
        max_steps=1,
        strategy=SimpleNamespace(megatron_parallel=Rotation(rope, TINY.head_dim)),
        lightning_module=SimpleNamespace(config=config),
        datamodule=SimpleNamespace(
            manifest=SimpleNamespace(tokenizer=tokenizer, train_sha256="of training files")
        ),
    )


@pytest.mark.parametrize("rope", ROTATIONS.values(), ids=ROTATIONS)
def test_a_rotation_is_the_same_after_every_hand_over(rope, tmp_path, monkeypatch):
    def of_rotation(rotation: Rotation, length: int):
        return rotation.in_effect(length, torch.device("cpu"), interleaved=False)

    monkeypatch.setattr(checkpoint_callback, "rotation_of", of_rotation)  # no model is built here
    made = recipe(rope, tmp_path)
    records.record(ResolvedStage.of(made), start="scratch")  # config.yaml and stage.json
    read = yaml_file.read(resolved_read.folder_of(made) / "config.yaml")
    of_recipe = fdl.build(read.model.config.rope)
    assert of_recipe == rope

    checkpoint = Path(made.resume.resume_from_directory) / "step=1"
    checkpoint.mkdir(parents=True)
    checkpoint_callback._write_marker(checkpoint, _trainer(made, of_recipe), 1, {})
    stage_checks.require_same(ResolvedStage.of(read))  # a resume
    facts = checkpoint_facts(checkpoint)
    assert facts is not None
    assert facts["temperature"] == rope.temperature
    of_checkpoint = RopeScaling.from_dict(facts["rope"])
    assert of_checkpoint == rope

    config = json.loads(json.dumps(exported_config(None, TINY, of_checkpoint, 2048, "float32")))
    assert card_of(config, "imported").native_rope == rope

    rope_file.write(tmp_path / "rope.json", rope, {})
    assert rope_file.read(tmp_path / "rope.json") == rope


@pytest.mark.parametrize("rope", ROTATIONS.values(), ids=ROTATIONS)
def test_a_resume_with_another_rotation_is_refused(rope, tmp_path):
    made = recipe(rope, tmp_path)
    records.record(ResolvedStage.of(made), start="scratch")
    checkpoint = Path(made.resume.resume_from_directory) / "step=1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "longhaul.json").write_text('{"step": 1, "max_steps": 1, "tokenizer": ""}')
    made.model.config.rope.base += 1
    with pytest.raises(ValueError, match="recipe with another model"):
        stage_checks.require_same(ResolvedStage.of(made))


def test_the_record_of_a_stage_states_the_temperature(tmp_path):
    made = recipe(ROTATIONS["yarn"], tmp_path)
    records.record(ResolvedStage.of(made), start="scratch")
    stated = json.loads((resolved_read.folder_of(made) / "stage.json").read_text())["rope"]
    assert stated["temperature"] == ROTATIONS["yarn"].temperature
