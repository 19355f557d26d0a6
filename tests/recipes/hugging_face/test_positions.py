# SPDX-License-Identifier: Apache-2.0
"""The native context of published configs, what is told of it, and where a user states it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config import card_of, exported_config
from recipes.hugging_face.positions import native_rope, rotation_of
from recipes.hugging_face.rope import _KEYS, RECORD
from recipes.notation import rope_file
from recipes.shipped.named import card_named, combined
from tests.recipes.hugging_face.support.models import CONFIGS, SHAPE, folder, write_tokenizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0, "max_position_embeddings": 4096, "torch_dtype": "float16",
    "pretraining_tp": 1, "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
    "rope_theta": 1_000_000, "max_position_embeddings": 40_960, "max_window_layers": 36,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560,
    "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
    "sliding_window": 1024, "sliding_window_pattern": 6,
}  # fmt: skip


def linear(factor: float, **others: object) -> dict:
    return {"rope_scaling": {"type": "linear", "factor": factor}, **others}


def yarn(factor: float, original: int, **others: object) -> dict:
    fields = {"factor": factor, "original_max_position_embeddings": original, "type": "yarn"}
    return {"rope_scaling": {**fields, **others}}


PUBLISHED = {
    "Together's Llama 2 of 32K": (
        LLAMA | linear(8.0, max_position_embeddings=32_768), 32_768, (262_144,),
    ),
    "Vicuna 16K": (LLAMA | linear(4.0, max_sequence_length=16_384), 16_384, ()),
    "DeepSeek Coder 6.7B": (
        LLAMA | linear(4.0, max_position_embeddings=16_384, rope_theta=100_000), 16_384, (65_536,),
    ),
    "Gemma 3 4B, its text model": (GEMMA3 | linear(8.0), 131_072, (1_048_576,)),
    "a length before extension that a second field confirms": (
        LLAMA | linear(2.0, max_seq_len=8192), 8192, (),
    ),
    "linear with its original length": (
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0,
                                  "original_max_position_embeddings": 4096}}, 32_768, (),
    ),
    "Qwen 3 with the authors' YaRN": (QWEN3 | yarn(4.0, 32_768), 131_072, (40_960,)),
    "Qwen 2.5 with the authors' YaRN": (
        QWEN3 | yarn(4.0, 32_768) | {"max_position_embeddings": 32_768}, 131_072, (),
    ),
    "Yarn-Mistral of 128K": (
        MISTRAL | yarn(16.0, 8192, finetuned=True) | {"max_position_embeddings": 32_768},
        131_072, (32_768,),
    ),
    "YaRN without training": (
        LLAMA | yarn(4.0, 4096, finetuned=False), 16_384, (4096,),
    ),
    "YaRN without its original length": (
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 8192, (4096,),
    ),
    "InternLM 2 as a Llama": (
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0},
                 "max_position_embeddings": 32_768}, 65_536, (32_768,),
    ),
    "plain, with a second length": (LLAMA | {"max_sequence_length": 2048}, 4096, (2048,)),
}  # fmt: skip


@pytest.mark.parametrize(("config", "context", "others"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_native_context_is_read_and_other_readings_are_told(config, context, others):
    card = card_of(config, "published")
    assert (card.native_context, card.other_contexts) == (context, others)
    told = [note for note in card.notes if "--native-context" in note]
    assert [f"{other:,}" in said for said in told for other in others] == [True] * len(others)
    assert len(told) == bool(others)


@pytest.mark.parametrize("name", ["Together's Llama 2 of 32K", "Yarn-Mistral of 128K"])
def test_an_export_tells_its_context(name):
    card = card_of(PUBLISHED[name][0], "published")
    config = exported_config(None, card, card.native_rope, card.native_context, "bfloat16")
    again = card_of(json.loads(json.dumps(config)), "again")
    assert (again.native_context, again.other_contexts) == (card.native_context, ())


def write(to: Path, config: dict) -> Path:
    to.mkdir(parents=True)
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_a_ladder_does_not_write_the_model_s_own_stretch_as_its_extension(answer):
    write(Path("snippet"), PUBLISHED["Qwen 3 with the authors' YaRN"][0])
    new = ("ladders", "new", "a.yaml", "--card", "./snippet", "--seq")
    assert "the context of snippet is 131,072 tokens already" in answer(*new, "96K").error()
    told = answer(*new, "128K").err
    assert "trained at 131,072 tokens or at 40,960" in told
    assert "rope: native" in Path("a.yaml").read_text()
    stated = ("ladders", "new", "b.yaml", "--card", "./snippet", "--seq", "128K")
    told = answer(*stated, "--native-context", "40960").err
    assert "or at" not in told
    assert "rope: native" in Path("b.yaml").read_text()
    card, ladder, said = combined("./snippet", "b.yaml")
    assert (card.native_context, ladder.native_context) == (40_960, 40_960)
    assert not any("--native-context" in words for words in said)


def test_a_stated_context_is_used_by_every_command(answer):
    config = PUBLISHED["DeepSeek Coder 6.7B"][0]
    where = write(Path("coder"), config)
    (shown, stated) = (
        json.loads(answer("rope", of, where, *words, "--json").out)
        for of, words in (("--model", ()), ("--card", ("--native-context", "64K")))
    )
    assert (shown["trained_tokens"], stated["trained_tokens"]) == (16_384, 65_536)
    assert stated["rotations"]["own"]["rope"]["original_length"] == 16_384
    planned = answer("plan", "./coder", "--seq", "128K", "--gpus", "8", "--native-context", "64K")
    assert "--seq 128K --native-context 65536 --tokens" in planned.out


def test_an_import_records_the_context_that_is_stated(answer, tmp_path):
    source = folder(tmp_path / "published", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "trained at 128 tokens or at 64" in answer("import", "--from", source).err
    words = ("import", "--from", source, "--to", "models/stated", "--native-context", "64")
    assert "or at" not in answer(*words).err
    assert card_named("models/published").native_context == 128
    card = card_named("models/stated")
    assert (card.native_context, card.notes) == (64, [])
    assert answer("export", "--from", "models/stated", "--to", "x")[0] == 0


SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0, "original_max_position_embeddings": 4096},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 4096},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 2048, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "factor": 2.0, "original_max_position_embeddings": 2048, "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
    },
}  # fmt: skip
OTHERS = {
    "truncate": False, "finetuned": False, "short_factor": [1.5] * 64, "long_factor": [3.0] * 64,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "key"), [(method, key) for method, keys in _KEYS.items() for key in keys]
)
def test_every_field_of_a_rotation_that_is_taken_changes_what_is_read(method, key):
    scaling = {"rope_type": method, **SCALINGS[method]}
    changed = scaling | {key: OTHERS.get(key, 1.25)}
    if key == "original_max_position_embeddings" and method == "dynamic":
        with pytest.raises(ValueError, match=key):
            rotation_of(LLAMA | {"rope_scaling": changed})
        return
    assert rotation_of(LLAMA | {"rope_scaling": changed}) != rotation_of(
        LLAMA | {"rope_scaling": scaling}
    )


TEMPERATURES = {
    "DeepSeek-R1-0528-Qwen3-8B": ({"type": "yarn", "attn_factor": 0.8782488562869419}, 1.0),
    "by rope_parameters": ({"rope_type": "yarn", "attn_factor": 0.5}, 0.5693147),
    "a longrope of vLLM": (
        {**SCALINGS["longrope"], "rope_type": "longrope", "factor": 32.0,
         "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}, 1.243163,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "temperature"), TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_temperature_that_transformers_ignores_is_as_its_field_means_and_told(
    name, fields, temperature
):
    config = LLAMA | {name: {**SCALINGS["yarn"], **fields}}
    card = card_of(config, "published")
    assert card.native_rope.temperature == pytest.approx(temperature, rel=1e-6)
    (told,) = (note for note in card.notes if "temperature" in note)
    assert f"a temperature of {temperature:.5f}, as in SGLang; transformers ignores it" in told
    written = exported_config(config, card, card.native_rope, 8192, "bfloat16")["rope_scaling"]
    assert written["attention_factor"] == card.native_rope.temperature
    again = card_of(json.loads(json.dumps(exported_config(
        config, card, card.native_rope, 8192, "bfloat16"
    ) | {RECORD: None})), "again")  # fmt: skip
    assert (again.native_rope.temperature, again.notes) == (card.native_rope.temperature, [])


def test_an_attn_factor_of_1_is_the_paper_s_and_nothing_is_told_and_two_temperatures_are_refused():
    card = card_of(LLAMA | yarn(4.0, 1024, attn_factor=1.0), "published")
    assert (card.native_rope, card.notes) == (
        RopeScaling.yarn(base=10_000, factor=4.0, original_length=1024), [],
    )  # fmt: skip
    two = {"attention_factor": 1.0, "attn_factor": 1.0}
    with pytest.raises(ValueError, match=r"attention_factor 1\.0, a temperature of 1, and attn_"):
        card_of(LLAMA | yarn(4.0, 1024, **two), "published")


V5 = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
NEMOTRON = {
    "model_type": "nemotron", "hidden_size": 3072, "num_attention_heads": 24, "head_dim": 128,
    "max_position_embeddings": 4096, "rope_theta": 10_000.0,
}  # fmt: skip
OTHER_FAMILIES = {
    "DeepSeek V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128,
         "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "max_position_embeddings": 163_840,
         **yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0)}, 64, 32,
    ),
    "MiniCPM 3, unknown to transformers": (
        {"model_type": "minicpm3", "hidden_size": 2560, "num_attention_heads": 40,
         "qk_rope_head_dim": 32, "max_position_embeddings": 32_768, "rope_theta": 10_000.0}, 32, 16,
    ),
    "Nemotron without its part": (NEMOTRON, 128, 32),
    "GLM 4 without its part": (
        {"model_type": "glm", "hidden_size": 4096, "num_attention_heads": 32,
         "max_position_embeddings": 131_072, "rope_theta": 10_000.0}, 128, 32,
    ),
    "Pythia": (
        {"model_type": "gpt_neox", "hidden_size": 2048, "num_attention_heads": 16,
         "rotary_pct": 0.25, "rotary_emb_base": 20_000, "max_position_embeddings": 2048}, 128, 16,
    ),
    "Gemma 3 in the form of transformers 5": (
        {key: value for key, value in GEMMA3.items() if "rope_" not in key}
        | {"rope_parameters": V5}, 256, 128,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "size", "pairs"), OTHER_FAMILIES.values(), ids=OTHER_FAMILIES)
def test_rope_reads_a_folder_by_the_rules_of_its_family(answer, config, size, pairs):
    shown = json.loads(answer("rope", "--model", write(Path("model"), config), "--json").out)
    assert shown["head_dim"] == size
    assert len(shown["rotations"]["own"]["wavelengths_tokens"]) == pairs
    assert native_rope(config) == rotation_of(config).rope
    if "rotary_emb_base" in config:
        assert native_rope(config).base == 20_000
    else:
        assert rope_file.read(Path("model/config.json")) == native_rope(config)


@pytest.mark.parametrize("name", ["nemotron", "llama", "smollm3"])
def test_an_export_keeps_what_the_import_states_though_it_is_a_library_s_default(name, tmp_path):
    where = folder(tmp_path / "published", name)
    stated = json.loads((where / "config.json").read_text())
    stated |= {"partial_rotary_factor": 0.5 if name == "nemotron" else 1.0}
    card = card_of(stated, "published")
    assert CONFIGS[name].num_hidden_layers == SHAPE["num_hidden_layers"]
    longer = replace(card, native_context=512)
    written = exported_config(stated, longer, card.native_rope, 512, "float32")
    lost = {key for key in stated if key not in written}
    assert lost == set()
    assert written["partial_rotary_factor"] == stated["partial_rotary_factor"]
    write_tokenizer(where)
