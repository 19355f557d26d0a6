# SPDX-License-Identifier: Apache-2.0
"""A published model comes in, is trained longer on several ranks, and goes out to be served."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from custom_modules.rope.config import RopeScaling
from recipes.checkpoints.marker import write_marker
from recipes.hugging_face.safetensors_files import stored_tensors
from tests.longhaul.support.hugging_face_stage import recipe, train_on_forked_rank
from tests.ranks import Ranks
from tests.recipes.hugging_face.support.models import CONTEXT, folder
from tests.recipes.hugging_face.support.stages import LENGTH
from tests.recipes.hugging_face.test_parity import (
    assert_same,
    logits_of_megatron,
    logits_of_transformers,
)
from tests.runs.conftest import NEMO

YARN = RopeScaling.yarn(base=5_000, factor=8.0, original_length=CONTEXT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"), [({"tp": 2, "cp": 2}, 4), ({}, 1)], ids=["TP=2 CP=2", "one rank"]
)
def test_a_stage_trained_from_an_import_is_exported_to_the_logits_it_has(
    tmp_path, small_store, megatron_rank, answer, layout, ranks
):
    source = folder(tmp_path / "published", "qwen2", num_attention_heads=8, num_key_value_heads=4)
    shutil.copytree(small_store / "tokenizer", source, dirs_exist_ok=True)
    assert answer("import", "--from", source)[0] == 0
    start = tmp_path / "models" / "published"
    options = {
        "start": str(start),
        "run": str(tmp_path / "run"),
        "store": str(small_store),
        "layout": layout,
        "rope": YARN.to_dict(),
    }
    made = recipe(options)
    from longhaul.jobs import records, stage_checks
    from recipes.resolved.stage import ResolvedStage

    resolved = ResolvedStage.of(made)
    stage_checks.require_inputs(resolved)
    stage_checks.require_start(resolved)
    records.record(resolved, start=str(start))
    with Ranks(
        train_on_forked_rank, ranks, options, str(tmp_path / "output.log"), server=NEMO
    ) as started:
        started.results(300)
    stage = resolved.folder
    lines = (stage / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5

    assert answer("export", "--from", stage, "--to", "exported")[0] == 0
    exported = logits_of_transformers(tmp_path / "exported", LENGTH)
    assert_same(exported, logits_of_megatron(stage, LENGTH))
    published = stored_tensors(source)
    assert stored_tensors(tmp_path / "exported").keys() == published.keys()
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["max_position_embeddings"] == LENGTH
    assert config["original_max_position_embeddings"] == CONTEXT
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.model_max_length == LENGTH
    moved = [
        (after - before).abs().max().item()
        for before, after in zip(_weights(source), _weights(tmp_path / "exported"), strict=True)
    ]
    assert 0 < max(moved) < 5 * 1e-3 * 1.1  # Adam's five steps at most; random weights lie apart


def _weights(model: Path) -> list[torch.Tensor]:
    """Return the tensors of a published or exported model, in the order of their names."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [tensor for _, tensor in sorted(loaded.state_dict().items())]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return folder(tmp_path_factory.mktemp("models") / "published")


@pytest.fixture(scope="module")
def imported(published) -> Path:
    """Return an import of the published model."""
    from tests.recipes.hugging_face.test_parity import imported

    imported(published, published.with_name("imported"))
    return published.with_name("imported")


@pytest.fixture
def stage(imported, tmp_path) -> Path:
    """Return the folder of a stage that began with the import, made without training it."""
    checkpoint = tmp_path / "run" / "stages" / "longer" / "checkpoints" / "step=5"
    shutil.copytree(imported, checkpoint, ignore=shutil.ignore_patterns("hugging_face"))
    marker = json.loads((checkpoint / "longhaul.json").read_text())
    marker |= {"step": 5, "max_steps": 5, "seq_length": LENGTH, "rope": YARN.to_dict()}
    write_marker(checkpoint, marker)
    recipe = {
        "data": {"seq_length": LENGTH, "store": "stores/none"},
        "log": {"name": "longer"},
        "model": {
            "config": {
                "_target_": "recipes.nemo2.model.LongContextLlamaConfig",
                "num_layers": 2,
                "hidden_size": 48,
                "ffn_hidden_size": 80,
                "num_attention_heads": 6,
                "num_query_groups": 2,
                "kv_channels": 16,
                "vocab_size": 512,
                "share_embeddings_and_output_weights": False,
                "layernorm_epsilon": 1e-6,
                "init_method_std": 0.02,
            }
        },
        "resume": {"start": str(imported)},
    }
    folder = checkpoint.parents[1]
    (folder / "config.yaml").write_text(json.dumps(recipe))
    return folder


def _edited(stage: Path, *path: str, to: object) -> None:
    """Change one value of the stage's recipe."""
    recipe = node = json.loads((stage / "config.yaml").read_text())
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = to
    (stage / "config.yaml").write_text(json.dumps(recipe))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "there/is/none"), "no folder there/is/none"),
        (("--from", "PUBLISHED", "--card", "llama31_8"), "did you mean llama31_8b"),
        (("--from", "PUBLISHED", "--card", "llama31_8b"), "layers is 2 where llama31_8b has 32"),
        (("--from", "PUBLISHED", "--to", "."), "already exists"),
        (("--from", "PUBLISHED", "--to", "file/x"), "file is not a folder"),
        (("--from", "PUBLISHED", "--to", "dangling"), "dangling is a link"),
        (("--from", "PUBLISHED", "--to", "n" * 300), "file name too long"),
        (("--from", "PUBLISHED", "--revision", "main"), "is a folder"),
    ],
)
def test_a_mistaken_import_is_told(answer, published, words, said):
    Path("file").touch()
    Path("dangling").symlink_to("nothing")
    words = [published if word == "PUBLISHED" else word for word in words]
    assert said in answer("import", *words).error()


def test_the_folder_that_one_stands_in_is_imported_by_its_name(answer, published, tmp_path):
    source = Path(shutil.copytree(published, tmp_path / "mine"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(source)
        assert answer("import", "--from", ".")[0] == 0
        assert Path("models/mine/longhaul.json").is_file()


def test_a_name_that_the_hub_does_not_give_is_told(answer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = answer("import", "--from", "nobody/no-model").error()
    assert "the Hugging Face hub cannot be reached: without network, name a folder" in told


def test_a_model_of_the_hub_is_one_with_its_prefix_and_without(
    answer, monkeypatch, published, tmp_path
):
    from recipes.checkpoints.marker import require_origin

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(published))
    assert answer("import", "--from", "hf:somebody/small")[0] == 0
    require_origin(tmp_path / "models" / "small", "somebody/small")


def _without_tensor(source: Path) -> None:
    _with_tensors(source, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def _with_unknown_tensor(source: Path) -> None:
    _with_tensors(source, lambda tensors: tensors.update({"model.extra": torch.zeros(3)}))


def _with_other_shape(source: Path) -> None:
    _with_tensors(source, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))


def _with_two_dtypes(source: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    _with_tensors(source, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))


def _with_a_layer_of_another_dtype(source: Path) -> None:
    def change(tensors) -> None:
        tensors.update({name: t.bfloat16() for name, t in tensors.items() if "layers.1." in name})

    _with_tensors(source, change)


def _with_tensors(source: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def _pickled(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def _without_tokenizer(source: Path) -> None:
    for file in source.glob("*token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_tensor, "lack 1 of the 21 tensors of a llama model, model.layers.1.mlp.up_proj"),
        (_with_unknown_tensor, "model.extra the first; they would be lost"),
        (_with_other_shape, "model.norm.weight is (3,); by config.json it would be (48,)"),
        (_with_two_dtypes, "need one dtype"),
        (_with_a_layer_of_another_dtype, "F32; Megatron has them as one tensor"),
        (_pickled, "pickle"),
        (_without_tokenizer, "changed has no tokenizer: no tokenizer.json"),
    ],
)
def test_a_folder_that_is_no_such_model_is_refused(answer, published, tmp_path, change, said):
    source = Path(shutil.copytree(published, tmp_path / "changed"))
    change(source)
    assert said in answer("import", "--from", source).error()
    assert not (tmp_path / "models" / "changed").exists()


def test_a_base_that_is_left_to_transformers_is_told(answer, published, tmp_path):
    source = Path(shutil.copytree(published, tmp_path / "changed"))
    _without_tokenizer(source)  # so nothing is imported
    said = "states no rope_theta; the base is that of transformers for llama, 10,000"
    assert said not in answer("import", "--from", source).err
    config = json.loads((source / "config.json").read_text())
    del config["rope_theta"]
    (source / "config.json").write_text(json.dumps(config))
    assert said in answer("import", "--from", source).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "none", "--to", "x"), "there is no folder none; name the folder"),
        (("--from", "STAGE", "--to", "."), "already exists"),
        (("--from", "STAGE", "--to", "x", "--dtype", "int8"), "one of bfloat16"),
        (("--from", "STAGE", "--to", "x", "--max-shard-gib", "0"), "at least 3.05176e-05 (32 KiB)"),
        (("--from", "STAGE", "--to", "x", "--max-shard-gib", "inf"), "and finite"),
        (("--from", "STAGE", "--to", "STAGE/config.yaml/x"), "config.yaml is not a folder"),
        (("--from", "run", "--to", "x"), "name one of its stages: run/stages/longer"),
        (("--from", "STAGE", "--to", "x", "--like", "none"), "no config.json"),
    ],
)
def test_a_mistaken_export_is_told(answer, stage, words, said):
    words = [word.replace("STAGE", str(stage)) for word in words]
    assert said in answer("export", *words).error()
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("resume", "start"), "models/gone", "with --like"),
        (("model", "config", "num_query_groups"), 3, "kv_heads is 2 where longer has 3"),
        (("model", "config", "softmax_scale"), 0.5, "softmax_scale"),
        (("model", "config", "_target_"), "recipes.nemo2.model.Other", "family cannot be exported"),
        (
            ("model", "config"),
            {"_target_": "recipes.nemo2.model.LongContextLlamaConfig"},
            "num_layers",
        ),
    ],
)
def test_a_stage_that_has_no_words_in_hugging_face_is_not_exported(
    answer, stage, path, value, said
):
    _edited(stage, *path, to=value)
    assert said in answer("export", "--from", stage, "--to", "x").error()


def test_a_checkpoint_of_another_format_is_refused(answer, stage):
    checkpoint = stage / "checkpoints" / "step=5"
    (checkpoint / "weights" / "metadata.json").unlink()
    for file in (checkpoint / "weights").iterdir():  # as Megatron FSDP leaves them
        file.rename(checkpoint / file.name)
    (checkpoint / "weights").rmdir()
    marker = json.loads((checkpoint / "longhaul.json").read_text())
    del marker["files"]
    write_marker(checkpoint, marker)
    assert "torch_dist" in answer("export", "--from", stage, "--to", "x").error()
    assert not Path("x").exists()


def test_weights_that_hugging_face_has_no_name_for_are_not_lost(answer, imported, stage):
    _edited(stage, "resume", "start", to=None)
    _edited(stage, "model", "config", "share_embeddings_and_output_weights", to=True)
    told = answer("export", "--from", stage, "--to", "x").error()
    assert "has module.output_layer.weight" in told
    assert "would be lost" in told


@pytest.mark.parametrize("at", [".", "checkpoints", "checkpoints/step=5"])
def test_a_stage_is_found_by_its_folder_its_checkpoints_and_one_of_them(answer, stage, at):
    code, _, shown = answer("export", "--from", stage / at, "--to", "x")
    assert code == 0, shown
    config = json.loads(Path("x/config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == LENGTH


def test_a_run_goes_back_through_its_stages_to_the_import(answer, stage, tmp_path):
    later = tmp_path / "run" / "stages" / "longest"
    shutil.copytree(stage, later)
    _edited(later, "resume", "start", to=str(stage / "checkpoints"))
    assert answer("export", "--from", later, "--to", "x")[0] == 0
    assert (Path("x/tokenizer.json")).is_file()


def test_positions_that_skip_export_to_their_target(answer, stage):
    _edited(stage, "data", "positions", to={"target_length": 4 * LENGTH})
    assert answer("export", "--from", stage, "--to", "x")[0] == 0
    assert json.loads(Path("x/config.json").read_text())["max_position_embeddings"] == 4 * LENGTH


def test_weights_are_cast_where_a_dtype_is_asked_for(answer, stage, published):
    words = ("export", "--from", stage, "--to", "x", "--dtype", "bfloat16")
    assert answer(*words, "--max-shard-gib", "0.00005")[0] == 0
    exported, before = stored_tensors(Path("x")), stored_tensors(published)
    assert exported.keys() == before.keys()
    assert len({one.file for one in exported.values()}) > 1
    from safetensors import safe_open

    for name, one in exported.items():
        tensor = safe_open(one.file, "pt").get_tensor(name)
        assert torch.equal(tensor, safe_open(before[name].file, "pt").get_tensor(name).bfloat16())
    assert transformers.AutoConfig.from_pretrained("x").dtype == torch.bfloat16


def test_an_import_that_goes_out_again_is_what_came_in(answer, imported, published):
    assert answer("export", "--from", imported, "--to", "x")[0] == 0
    came, went = stored_tensors(published), stored_tensors(Path("x"))
    assert came.keys() == went.keys()
    from safetensors import safe_open

    for name, one in came.items():
        tensor = safe_open(went[name].file, "pt").get_tensor(name)
        assert torch.equal(tensor, safe_open(one.file, "pt").get_tensor(name))
    sides = {file.name for file in published.iterdir()} - {"config.json", "model.safetensors"}
    for name in sides:
        assert (Path("x") / name).read_bytes() == (published / name).read_bytes()
    config, again = (json.loads((at / "config.json").read_text()) for at in (published, Path("x")))
    assert again.pop("longhaul_rope") == {"method": "default", "base": 5000}
    assert again.pop("rope_parameters") == {"rope_type": "default", "rope_theta": 5000.0}
    assert again == config


def test_a_model_from_scratch_exports_with_the_tokenizer_of_its_store(
    answer, stage, small_store, published
):
    from data.store import Manifest

    _edited(stage, "resume", "start", to=None)
    _edited(stage, "data", "store", to=str(small_store))
    words = ("export", "--from", stage, "--to", "x")
    assert "made with another tokenizer" in answer(*words).error()
    tokenizer = Manifest.load(small_store).tokenizer
    marker = stage / "checkpoints" / "step=5" / "longhaul.json"
    facts = json.loads(marker.read_text()) | {"tokenizer": tokenizer.fingerprint}
    write_marker(marker.parent, facts)
    assert answer(*words)[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("x")
    assert type(model).__name__ == "LlamaForCausalLM"
    ended = (model.config.eos_token_id, model.generation_config.eos_token_id)
    assert ended == (tokenizer.eod_id, tokenizer.eod_id)
    loaded = transformers.AutoTokenizer.from_pretrained("x")
    assert loaded.model_max_length == LENGTH
    assert len(loaded) == tokenizer.vocab_size
    before = transformers.AutoModelForCausalLM.from_pretrained(published)
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
