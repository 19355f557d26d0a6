# SPDX-License-Identifier: Apache-2.0
"""A user's mistake is one clear sentence and a non-zero exit, before any rank is started."""

import json
import shutil

import pytest

PRETRAIN = ("pretrain", "--factory", "tiny_8k")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--ladder", "tny"), "did you mean tiny"),
        (("run", "--ladder", "tiny", "--executor", "moon"), "there are local and slurm"),
        (("pretrain", "--factory", "tiny_9k"), "did you mean tiny"),
        (("pretrain",), "--factory NAME or --yaml FILE"),
        ((*PRETRAIN, "trainer.max_stpes=20"), "did you mean trainer.max_steps"),
        ((*PRETRAIN, "bogus"), "write KEY=VALUE"),
        (
            (*PRETRAIN, "trainer.strategy.context_paralel_size=2"),
            "did you mean context_parallel_size",
        ),
        (
            (*PRETRAIN, "data.seq_length=8190", "model.config.seq_length=8190",
             "trainer.callbacks[0].seq_length=8190", "trainer.callbacks[0].tokens_per_batch=8190"),
            "not divisible by 2 x CP = 4",
        ),
        ((*PRETRAIN, "trainer.strategy.context_parallel_size=8", "trainer.devices=8"), "heads"),
        ((*PRETRAIN, "trainer.devices=3"), "world size 3"),
        (
            (*PRETRAIN, "model.config.tiling.loss=true", "model.config.tiling.loss_tile=0"),
            "loss_tile is 0 tokens; it must be at least 1",
        ),
        (
            (*PRETRAIN, "model.config.recompute.kind=full", "model.config.offload.tensors=inputs",
             "model.config.offload.cap_gib=0.001"),
            "GiB of host memory on a rank",
        ),
        (
            (*PRETRAIN, "model.config.recompute.kind=kept_attention",
             "model.config.recompute.layers=2"),
            "layers is 2, which has no effect on kept_attention",
        ),
        (
            (*PRETRAIN, "model.config.recompute.kind=full",
             "model.config.recompute_granularity=selective"),
            "set that one",
        ),
        ((*PRETRAIN, "trainer.plugins.fp8=hybrid"), "does not compute on cpu"),
        ((*PRETRAIN, "trainer.devices=auto"), "trainer.devices is 'auto'"),
        ((*PRETRAIN, "trainer.strategy.tensor_model_parallel_size=0"), "TP is 0"),
        ((*PRETRAIN, "trainer.strategy.sequence_parallel=True"), "goes with tensor parallelism"),
        (
            (*PRETRAIN, "model.config.tensor_model_parallel_size=2"),
            "set that one",
        ),
        ((*PRETRAIN, "trainer.callbacks=[]"), "no StepLog"),
        ((*PRETRAIN, "model.config.rope.factor=0.5"), "RoPE factor is 0.5"),
        ((*PRETRAIN, "model.config.rope.method=yarm"), "yarm"),
        ((*PRETRAIN, "--rope", "yarn:factor=0.5"), "RoPE factor is 0.5"),
        ((*PRETRAIN, "--rope", "yarn:factor=2,original_length=16384"), "above the 8,192 tokens"),
        ((*PRETRAIN, "model.config.rope.original_length=16384"), "above the 8,192 tokens"),
        ((*PRETRAIN, "--rope", "yarn:factor=2,interleaved=true"), "interleaved of the rotation is"),
        ((*PRETRAIN, "model.config.rope.partial_rotary_factor=0.5"), "a fact of the model"),
        ((*PRETRAIN, "--rope", "nowhere.json"), "nowhere.json cannot be read"),
        ((*PRETRAIN, "optim.lr_scheduler.warmup_ratio=3"), "warmup_ratio is 3"),
        ((*PRETRAIN, "optim.config.lr=abc"), "optim.config.lr cannot be 'abc'"),
        ((*PRETRAIN, "optim.config.lr=abc"), "it takes a number"),
        ((*PRETRAIN, "model.config.cp.ulysses=x"), "it takes a number"),
        ((*PRETRAIN, "model.config.cp.kind=Ring"), "it is one of auto, ring, ulysses"),
        ((*PRETRAIN, "model.config.attention_kernel=flash"), "it is one of auto, cpu_flash"),
        ((*PRETRAIN, "data.documents=Within"), "it is one of across, within"),
        (
            ("pretrain", "--factory", "llama32_1b_nemo_16k", "trainer.plugins.precision='32'"),
            "no CUDA attention kernel",
        ),
        ((*PRETRAIN, "data.store=nowhere"), "nowhere"),
        (("evaluate", "--run", "nowhere"), "nowhere"),
        (("report", "--run", "nowhere"), "nowhere"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_a_mistake_is_answered_with_what_would_be_right(answer, words, said):
    assert said in answer(*words).error()


def test_a_misspelled_key_in_a_recipe_file_is_refused_with_the_right_name(answer, tmp_path):
    from recipes import yaml_file
    from recipes.factories import FACTORIES

    text = yaml_file.dump(FACTORIES["tiny_8k"]())
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace("context_parallel_size: 2", "context_paralel_size: 2"))
    assert "did you mean context_parallel_size" in answer("pretrain", "--yaml", path).error()


def test_a_recipe_file_may_not_name_what_recipes_are_not_made_of(answer, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("_target_: os.system\n_partial_: true\ncommand: 'true'\n")
    assert "os.system" in answer("pretrain", "--yaml", path).error()


def test_a_recipe_file_may_not_name_what_a_trusted_package_only_passes_on(answer, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "_target_: lightning.pytorch.trainer.connectors.signal_connector.call\n_partial_: true\n"
    )
    assert "is really of subprocess" in answer("pretrain", "--yaml", path).error()


def test_a_file_with_another_partial_than_pretrain_is_no_recipe(answer, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("_target_: nemo.collections.llm.api.validate\n_partial_: true\n")
    assert "holds no recipe" in answer("pretrain", "--yaml", path).error()


def test_an_override_of_a_place_that_all_stages_would_share_is_refused(answer, small_store):
    said = answer(
        "run", "--ladder", "tiny", "--store", small_store, "log.ckpt.dirpath=here"
    ).error()
    assert "--out and --store" in said


def test_a_run_folder_keeps_to_the_recipe_of_its_checkpoints(answer, small_store, tmp_path):
    from longhaul import stages

    run = tmp_path / "runs" / "tiny"
    recipe = stages.factory("tiny_512")
    recipe.data.store = str(small_store)
    stages.absolute(recipe)
    stages.record(recipe, start="scratch")
    _write_checkpoint(run / "stages" / "tiny_512" / "checkpoints" / "step=20", small_store)
    said = answer("run", "--ladder", "tiny", "--store", small_store, "trainer.max_steps=30").error()
    assert "another trainer.max_steps" in said


def test_a_truncated_store_is_refused(answer, small_store, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(small_store, store)
    tokens = store / "train.bin"
    tokens.write_bytes(tokens.read_bytes()[:-100])
    assert "train.bin" in answer(*PRETRAIN, f"data.store={store}").error()


def test_a_stage_whose_predecessor_is_missing_is_refused(answer, small_store):
    said = answer(*PRETRAIN, f"data.store={small_store}").error()
    assert "no complete checkpoint" in said


def test_a_stage_whose_predecessor_stopped_early_is_refused(answer, small_store, tmp_path):
    _write_checkpoint(tmp_path / "start" / "step=10", small_store, step=10, max_steps=20)
    said = answer(
        *PRETRAIN, f"data.store={small_store}", f"resume.start={tmp_path / 'start'}"
    ).error()
    assert "at step 10 of 20" in said


def test_a_store_made_with_another_tokenizer_than_the_checkpoint_is_refused(
    answer, small_store, tmp_path
):
    _write_checkpoint(tmp_path / "start" / "step=20", small_store, tokenizer="f" * 64)
    said = answer(
        *PRETRAIN, f"data.store={small_store}", f"resume.start={tmp_path / 'start'}"
    ).error()
    assert "tokenizer" in said


def test_a_recipe_for_gpus_is_refused_without_them(answer, small_store):
    said = answer(
        "pretrain", "--factory", "llama32_1b_nemo_16k", f"data.store={small_store}"
    ).error()
    assert "needs 8 CUDA GPUs" in said


def test_an_empty_source_is_refused(answer, tmp_path):
    (tmp_path / "empty").mkdir()
    said = answer("prepare", "--source", tmp_path / "empty", "--out", tmp_path / "out").error()
    assert "empty" in said


def test_a_broken_line_is_named_with_its_file_and_number(answer, tmp_path):
    lines = tmp_path / "documents.jsonl"
    lines.write_text('{"text": "one"}\n{"text": \n')
    said = answer("prepare", "--source", lines, "--out", tmp_path / "out").error()
    assert "documents.jsonl" in said
    assert "2" in said


def _write_checkpoint(folder, store, *, step=20, max_steps=20, tokenizer=None):
    """Write a completeness marker, which is all that is read before ranks start."""
    from data.store import Manifest

    folder.mkdir(parents=True)
    facts = {
        "step": step,
        "max_steps": max_steps,
        "tokenizer": tokenizer or Manifest.load(store).tokenizer.fingerprint,
    }
    (folder / "longhaul.json").write_text(json.dumps(facts))


def test_a_tile_above_a_rank_s_tokens_is_one_tile_with_a_note(answer):
    tile = "model.config.tiling.loss_tile=100000"
    code, _, shown = answer(*PRETRAIN, "model.config.tiling.loss=true", tile, "--dryrun")
    assert code == 0
    assert "note: tiling loss_tile is 100,000 tokens and a rank has" in shown
