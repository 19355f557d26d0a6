# SPDX-License-Identifier: Apache-2.0
"""`rope_parameters` of transformers 5: flat and by kind of layer, and what version 5 computes.

The last tests run an interpreter that has transformers 5: the variable TRANSFORMERS_5 names it, and
`make test-transformers-5` makes one.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies
from recipes.hugging_face.config import card_of, exported_config
from recipes.hugging_face.rope import RECORD, rope_fields, rope_of, rotations_of
from recipes.models import CARDS
from tests.recipes.hugging_face.test_config import LLAMA, NEMOTRON
from tests.recipes.hugging_face.test_rope import HEAD_DIM, LENGTH, ROTATIONS, exported

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
READ = {
    "yarn": RopeScaling.yarn(base=500_000, factor=8.0, original_length=8192),
    "plain": RopeScaling.base_change(10_000),
}
WHOLE = {name: rope for name, rope in ROTATIONS.items() if rope.partial_rotary_factor == 1}
EVERY = pytest.mark.parametrize("rope", WHOLE.values(), ids=WHOLE)


@pytest.mark.parametrize(
    ("config", "rotations"),
    [
        (
            {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}, "layer_types": [SLIDING, FULL]},
            {FULL: READ["yarn"], SLIDING: READ["plain"]},
        ),
        (
            {"rope_parameters": {FULL: YARN, SLIDING: None}},
            {FULL: READ["yarn"], SLIDING: None},
        ),
        (
            {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}, "layer_types": [FULL, FULL]},
            {FULL: READ["yarn"]},
        ),
        (
            {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}, "rope_theta": 1e6},
            {FULL: READ["yarn"], SLIDING: READ["plain"]},
        ),
        (
            {"rope_parameters": PLAIN, "layer_types": [FULL, SLIDING]},
            {FULL: READ["plain"], SLIDING: READ["plain"]},
        ),
        ({"rope_parameters": PLAIN}, {FULL: READ["plain"]}),
        ({"rope_theta": 1e4, "layer_types": ["linear_attention"]}, {FULL: READ["plain"]}),
    ],
    ids=["two kinds", "one kind without", "a kind of no layer", "the base of another kind",
         "flat for two kinds", "flat", "rope_theta alone"],
)  # fmt: skip
def test_a_rotation_is_read_for_each_kind_of_layer(config, rotations):
    assert rotations_of(config) == rotations


def test_a_model_whose_kinds_of_layers_rotate_alike_has_one_rotation():
    config = {"rope_parameters": {FULL: YARN, SLIDING: YARN}, "layer_types": [FULL, SLIDING]}
    assert rope_of(config) == READ["yarn"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}},
            r"has full_attention \(yarn, base 500,000\) and sliding_attention \(default, base "
            r"10,000\); every layer",
        ),
        (
            {"rope_parameters": {FULL: YARN, SLIDING: None}},
            r"sliding_attention \(no rotation\); every layer",
        ),
        (
            {"rope_parameters": {FULL: PLAIN, "mamba": {}}},
            "has mamba next to fields by kind of layer; the kinds known here are full_attention",
        ),
        (
            {"rope_parameters": {FULL: PLAIN, "rope_theta": 1e4}},
            "has rope_theta next to fields by kind of layer",
        ),
        (
            {"rope_parameters": {FULL: PLAIN}, "layer_types": [FULL, SLIDING]},
            "has fields for full_attention, and layer_types has sliding_attention too",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "default"}}},
            r"rope_parameters \(full_attention\) of config.json has no rope_theta",
        ),
        (
            {"rope_parameters": {FULL: PLAIN, SLIDING: 7}},
            "has sliding_attention 7; it is an object",
        ),
        (
            {"rope_parameters": {FULL: PLAIN, SLIDING: PLAIN | {"rope_type": "spiral"}}},
            r"rope_parameters \(sliding_attention\) of config.json has rope_type 'spiral'",
        ),
        (
            {"rope_parameters": PLAIN | {"mrope_section": [8, 12, 12]}},
            "rope_parameters of config.json has mrope_section, which rope_type default does not",
        ),
        (
            {"rope_parameters": {FULL: YARN}, "rope_scaling": {"rope_type": "linear"}},
            r"has rope_scaling and rope_parameters \(full_attention\), and rope_type differs",
        ),
        (
            {"rope_parameters": PLAIN, "rope_theta": 5e5},
            "has rope_theta 500000.0 and in rope_parameters 10000.0; they must be equal",
        ),
    ],
)
def test_parameters_that_are_not_known_or_differ_are_named(config, words):
    with pytest.raises(ValueError, match=words):
        rope_of(config)


def test_a_family_whose_layers_are_alike_is_refused_if_kinds_rotate_in_two_ways():
    published = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    with pytest.raises(ValueError, match=r"full_attention \(yarn, base 500,000\) and sliding_att"):
        card_of(published | {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}}, "it")


def test_an_export_states_the_same_rotation_for_both_versions():
    fields = rope_fields(ROTATIONS["yarn"], head_dim=HEAD_DIM, length=LENGTH)
    both = {**fields["rope_scaling"], "rope_theta": fields["rope_theta"]}
    assert fields["rope_parameters"] == both
    plain = rope_fields(READ["plain"], head_dim=HEAD_DIM, length=LENGTH)
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}


@EVERY
@pytest.mark.parametrize("left", ["rope_parameters", "rope_scaling"])
def test_a_file_of_one_version_is_read_as_that_of_both(rope, left):
    config = exported(rope)
    del config[left]
    if left == "rope_scaling":
        del config["rope_theta"]
    assert rope_of(config) == rope
    del config[RECORD]
    assert rotations_of(config) == rotations_of({**exported(rope), RECORD: None})


IN_VERSION_5 = """
import json, sys
from pathlib import Path
import torch, transformers
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.nemotron.modeling_nemotron import NemotronRotaryEmbedding
assert transformers.__version__.startswith("5."), transformers.__version__
rotaries = {"llama": LlamaRotaryEmbedding, "nemotron": NemotronRotaryEmbedding}
for folder in map(Path, sys.argv[1:]):
    config = AutoConfig.from_pretrained(folder)
    computed = {}
    for length in (512, 2048):
        rotary = rotaries[config.model_type](config)
        positions = torch.arange(length)[None]
        cos, _ = rotary(torch.zeros(1, length, 8), positions)
        computed[length] = [rotary.inv_freq.double().tolist(), float(cos[0, 0, 0])]
    (folder / "computed.json").write_text(json.dumps(computed))
    config.save_pretrained(folder / "saved")
"""


@pytest.fixture(scope="module")
def version_5(tmp_path_factory) -> Path:
    """Return a folder with what transformers 5 computes from an export of each rotation."""
    interpreter = os.environ.get("TRANSFORMERS_5")
    if not interpreter:
        pytest.skip("no transformers 5 here: `make test-transformers-5` installs it and runs this")
    folder = tmp_path_factory.mktemp("transformers_5")
    configs = {name: exported(rope) for name, rope in WHOLE.items()} | {"nemotron": nemotron()}
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    command = [interpreter, "-c", IN_VERSION_5, *(str(folder / name) for name in configs)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def nemotron() -> dict:
    """Return the exported config.json of a Nemotron, which rotates half of each head."""
    card = card_of(NEMOTRON | {"rope_scaling": None}, "published")
    rope = RopeScaling.ntk(base=10_000, factor=4.0, original_length=512)
    half = RopeScaling(**{**rope.to_dict(), "partial_rotary_factor": 0.5})
    return json.loads(json.dumps(exported_config(None, card, half, LENGTH, "bfloat16")))


@pytest.mark.parametrize("name", [*WHOLE, "nemotron"])
def test_transformers_5_rotates_as_trained_and_what_it_saves_is_read_as_trained(version_5, name):
    config = json.loads((version_5 / name / "config.json").read_text())
    rope = WHOLE.get(name) or rope_of(config, rotated=0.5)
    computed = json.loads((version_5 / name / "computed.json").read_text())
    head_dim = config["head_dim"]
    for length, (frequencies, temperature) in computed.items():
        # A rotation by length was computed for the longest sequence so far: this one's.
        ours, factor = inverse_frequencies(rope, head_dim, int(length))
        assert frequencies == pytest.approx(ours.tolist(), rel=1e-5)
        assert temperature == pytest.approx(factor, rel=1e-6)
    saved = json.loads((version_5 / name / "saved" / "config.json").read_text())
    assert "rope_scaling" not in saved
    assert rope_of(saved, rotated=0.5 if name == "nemotron" else 1.0) == rope


BY_KIND_IN_VERSION_5 = """
import json, sys
from pathlib import Path
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding
rotaries = {"gemma3_text": Gemma3RotaryEmbedding, "olmo3": Olmo3RotaryEmbedding,
            "smollm3": SmolLM3RotaryEmbedding}
for folder in map(Path, sys.argv[1:]):
    config = AutoConfig.from_pretrained(folder)
    rotary = rotaries[config.model_type](config)
    kinds = [""] if config.model_type == "smollm3" else ["full_attention_", "sliding_attention_"]
    computed = {
        kind: [getattr(rotary, f"{kind}inv_freq").double().tolist(),
               float(getattr(rotary, f"{kind}attention_scaling"))]
        for kind in kinds
    }
    (folder / "computed.json").write_text(json.dumps(computed))
    config.save_pretrained(folder / "saved")
"""
OF_LAYERS = ("smollm3_3b", "olmo3_7b", "gemma3_1b")


def test_transformers_5_rotates_each_kind_of_layer_as_trained(tmp_path):
    interpreter = os.environ.get("TRANSFORMERS_5")
    if not interpreter:
        pytest.skip("no transformers 5 here: `make test-transformers-5` installs it and runs this")
    ropes = {}
    for name in OF_LAYERS:
        card = CARDS[name]
        rope = RopeScaling.yarn(base=card.native_rope.base, factor=16.0, original_length=8192)
        ropes[name] = rope
        (tmp_path / name).mkdir()
        config = exported_config(None, card, rope, 131_072, "bfloat16")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    command = [interpreter, "-c", BY_KIND_IN_VERSION_5, *(str(tmp_path / name) for name in ropes)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for name, rope in ropes.items():
        card = CARDS[name]
        local = card.pattern.local_rope
        meant = {"": rope} if local is None else {
            "full_attention_": rope, "sliding_attention_": local,
        }  # fmt: skip
        computed = json.loads((tmp_path / name / "computed.json").read_text())
        assert computed.keys() == meant.keys()
        for kind, (frequencies, temperature) in computed.items():
            ours, factor = inverse_frequencies(meant[kind], card.head_dim, 131_072)
            assert frequencies == pytest.approx(ours.tolist(), rel=1e-5), (name, kind)
            assert temperature == pytest.approx(factor, rel=1e-6)
        saved = json.loads((tmp_path / name / "saved" / "config.json").read_text())
        again = card_of(saved, name)
        assert (again.pattern, again.native_rope) == (card.pattern, rope)
