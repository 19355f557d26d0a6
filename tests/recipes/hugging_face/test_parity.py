# SPDX-License-Identifier: Apache-2.0
"""Logits of transformers and of Megatron agree, of what comes in and of what goes out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config import card_of, read_config, require_weights
from recipes.hugging_face.safetensors_files import stored_tensors
from tests.recipes.hugging_face.support.models import CONFIGS, CONTEXT, VOCAB, folder
from tests.recipes.hugging_face.support.stages import LENGTH, untrained

pytestmark = pytest.mark.slow

SIZES = {"factor": 8.0, "original_max_position_embeddings": CONTEXT}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "yarn": {"rope_type": "yarn", **SIZES},
    "llama3": {"rope_type": "llama3", **SIZES, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        **SIZES,
        "short_factor": [1 + i / 64 for i in range(8)],
        "long_factor": [1 + i for i in range(8)],
    },
}
YARN = SCALINGS["yarn"]
OURS = {"base": 5_000, "factor": 8.0, "original_length": CONTEXT}
METHODS = {
    "base_change": RopeScaling.base_change(80_000),
    "linear": RopeScaling.linear(**OURS),
    "ntk": RopeScaling.ntk(**OURS),
    "dynamic": RopeScaling.dynamic(**OURS),
    "ntk_by_parts": RopeScaling.ntk_by_parts(**OURS),
    "yarn": RopeScaling.yarn(**OURS),
    "llama3": RopeScaling.llama3(**OURS),
    "longrope": RopeScaling(
        method="longrope",
        **OURS,
        short_factor=[1 + i / 64 for i in range(8)],
        long_factor=[1 + i / 2 for i in range(8)],
    ),
    "yarn on llama3": replace(
        RopeScaling.yarn(base=5_000, factor=2.0, original_length=4 * CONTEXT),
        before=RopeScaling.llama3(base=5_000, factor=4.0, original_length=CONTEXT),
    ),
}


def imported(source: Path, to: Path):
    """Import a folder; return its card."""
    from recipes.hugging_face.import_ import write_checkpoint

    card = card_of(read_config(source), to.name)
    stored = stored_tensors(source)
    require_weights(card, stored)
    write_checkpoint(to, source, card, stored)
    return card


def logits_of_transformers(source: Path, length: int) -> torch.Tensor:
    """Return logits [length, V] in fp32, loaded as anyone would."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(_ids(length)).logits[0]


def logits_of_megatron(stage: Path, length: int) -> torch.Tensor:
    """Return logits [length, V] in fp32 of the model that evaluation loads."""
    from eval.load_model import load

    model = load(stage, seq_length=LENGTH)
    with torch.no_grad():
        return model(_ids(length), torch.arange(length)[None], None)[0, :, :VOCAB]


def _ids(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))


def assert_same(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.std() > 0.3  # logits that say something
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_imported_model_of_each_family_has_the_logits_of_transformers_at_eight_times_the_length(
    tmp_path, megatron_rank, name
):
    # Its class in transformers reads no rope_scaling: a larger base instead.
    stretched = {"rope_theta": 80_000.0} if name == "nemotron" else {"rope_scaling": YARN}
    source = folder(tmp_path / "published", name, max_position_embeddings=LENGTH, **stretched)
    card = imported(source, tmp_path / "imported")
    assert name == "nemotron" or card.native_rope.method == "yarn"
    stage = untrained(tmp_path / "imported", card, card.native_rope, tmp_path / "run")
    assert_same(logits_of_transformers(source, LENGTH), logits_of_megatron(stage, LENGTH))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_an_imported_rope_scaling_turns_heads_as_transformers_does(
    tmp_path, megatron_rank, scaling
):
    original = {"original_max_position_embeddings": CONTEXT}
    at_top = original if scaling["rope_type"] == "longrope" else {}
    length = CONTEXT if scaling["rope_type"] == "dynamic" else LENGTH
    source = folder(
        tmp_path / "published",
        rope_scaling=scaling,
        max_position_embeddings=length,
        **at_top,
    )
    card = imported(source, tmp_path / "imported")
    stage = untrained(tmp_path / "imported", card, card.native_rope, tmp_path / "run")
    assert_same(logits_of_transformers(source, LENGTH), logits_of_megatron(stage, LENGTH))


@pytest.mark.parametrize("rope", METHODS.values(), ids=METHODS)
def test_a_stage_exports_to_the_logits_it_had_at_eight_times_the_length(
    tmp_path, megatron_rank, rope
):
    from recipes.hugging_face.export import export
    from recipes.hugging_face.source_checkpoint import trained

    card = imported(folder(tmp_path / "published"), tmp_path / "imported")
    stage = untrained(tmp_path / "imported", card, rope, tmp_path / "run")
    export(trained(stage), tmp_path / "exported")
    exported = logits_of_transformers(tmp_path / "exported", LENGTH)
    assert_same(exported, logits_of_megatron(stage, LENGTH))
    published = logits_of_transformers(tmp_path / "published", LENGTH)
    assert (exported - published).abs().max() > 0.05  # another rotation is seen


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stage_of_each_family_exports_to_the_logits_it_had(tmp_path, megatron_rank, name):
    from recipes.hugging_face.export import export
    from recipes.hugging_face.source_checkpoint import trained

    card = imported(folder(tmp_path / "published", name), tmp_path / "imported")
    made = RopeScaling.ntk if name == "nemotron" else RopeScaling.yarn
    part = card.native_rope.partial_rotary_factor
    rope = replace(made(**OURS), partial_rotary_factor=part)
    stage = untrained(tmp_path / "imported", card, rope, tmp_path / "run")
    export(trained(stage), tmp_path / "exported")
    exported = logits_of_transformers(tmp_path / "exported", LENGTH)
    assert_same(exported, logits_of_megatron(stage, LENGTH))
