# SPDX-License-Identifier: Apache-2.0
"""A user's mistake is one clear sentence and a non-zero exit, before any rank is started."""

import json
import shutil
from types import SimpleNamespace

import pytest

from benchmarks.reliability import bad_inputs
from longhaul import cli
from longhaul.options import WRITTEN_WHEN_STARTED
from recipes.ladders import LADDERS
from recipes.models import TINY

PRETRAIN = ("pretrain", "--factory", "tiny_8k")


@pytest.mark.parametrize("case", bad_inputs.with_nemo(), ids=lambda case: case.words)
def test_a_mistake_is_answered_with_what_would_be_right(case, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its ranks
    (outcome,) = bad_inputs.outcomes([case], cli.main)
    assert not outcome.problems, str(outcome)


def test_a_misspelled_key_in_a_recipe_file_is_refused_with_the_right_name(answer, tmp_path):
    from recipes.resolved import yaml_file
    from recipes.shipped.factories import FACTORIES

    text = yaml_file.dump(FACTORIES["tiny_8k"]())
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace("context_parallel_size: 2", "context_paralel_size: 2"))
    assert "did you mean context_parallel_size" in answer("pretrain", "--yaml", path).error()


def test_a_run_folder_keeps_to_the_recipe_of_its_checkpoints(answer, small_store, tmp_path):
    from longhaul.jobs import records
    from recipes.resolved import read
    from recipes.resolved.stage import ResolvedStage
    from recipes.shipped import factories

    run = tmp_path / "runs" / "tiny"
    recipe = factories.recipe_named("tiny_512")
    recipe.data.store = str(small_store)
    read.absolute(recipe)
    records.record(ResolvedStage.of(recipe), start="scratch")
    _write_checkpoint(run / "stages" / "tiny_512" / "checkpoints" / "step=20", small_store)
    said = answer("run", "--ladder", "tiny", "--store", small_store, "trainer.max_steps=30").error()
    steps = LADDERS["tiny"].stages[0].steps
    assert f"another trainer.max_steps (was {steps}, is 30); train with what it was" in said
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(small_store, elsewhere)
    said = answer("run", "--ladder", "tiny", "--store", elsewhere).error()
    assert f"another data.store (was {small_store}, is {elsewhere}); train" in said


def test_a_dry_run_without_a_store_says_what_makes_it(answer):
    shown = answer("run", "--ladder", "tiny", "--eval-cp", 2, "--dryrun").out
    assert "# tiny_8k is evaluated on 2 ranks: TP 1, CP 2, PP 1\n" in shown
    assert "tiny_2k is evaluated" not in shown
    assert "# there is no token store at stores/tiny; the run makes one first\n" in shown


def test_a_disk_without_room_for_the_checkpoints_is_refused(answer, small_store, monkeypatch):
    words = ("run", "--ladder", "tiny", "--store", small_store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    said = answer(*words).error()
    assert "the checkpoints' folder" in said
    assert f"needs about {4 * 12 * TINY.parameters / 2**20:,.1f} MiB" in said
    assert "its file system has 1.0 MiB free" in said


def test_a_dry_run_over_an_existing_run_says_what_is_not_trained_again(
    answer, small_store, tmp_path
):
    run = _recorded(tmp_path, small_store, {"tiny_512": "whole", "tiny_2k": "half"})
    words = ("run", "--ladder", "tiny", "--store", small_store, "--dryrun")
    code, shown, err = answer(*words)
    assert code == 0, err
    lines = [line for line in shown.splitlines() if line.startswith("# ")]
    steps = {name: _steps(run, name) for name in ("tiny_512", "tiny_2k")}
    assert lines == [
        f"# tiny_512 has all its {steps['tiny_512']} steps and is not trained again",
        f"# tiny_2k resumes from step {steps['tiny_2k'] // 2} of {steps['tiny_2k']}",
        f"# {WRITTEN_WHEN_STARTED}",
    ]
    assert "tiny_512/config.yaml" not in shown


def test_a_dry_run_on_a_narrow_terminal_says_below_the_table_what_it_leaves_out(
    answer, small_store, monkeypatch
):
    words = ("run", "--ladder", "tiny", "--store", small_store, "--dryrun")
    monkeypatch.setenv("COLUMNS", "120")
    assert "tiny_2k: RoPE" not in answer(*words).out
    monkeypatch.setenv("COLUMNS", "60")
    assert "\ntiny_8k: RoPE yarn, base 40,000, factor 4; tokens/step " in answer(*words).out
    monkeypatch.setenv("COLUMNS", "40")
    assert "; starts from tiny_2k\n" in answer(*words).out


@pytest.mark.parametrize(
    ("name", "end"), [("stage.json", "tokens"), ("config.yaml", "rope:"), ("config.yaml", "base: ")]
)
def test_a_dry_run_refuses_a_record_that_is_cut(answer, small_store, tmp_path, name, end):
    path = _recorded(tmp_path, small_store, {"tiny_512": "whole"}) / "stages" / "tiny_512" / name
    path.write_text(path.read_text().partition(end)[0])
    words = ("run", "--ladder", "tiny", "--store", small_store, "--dryrun")
    assert f"error: {path}" in answer(*words).error()


@pytest.mark.parametrize("of", ["run", "pretrain", "start"])
def test_a_stage_whose_marker_is_damaged_is_not_begun_anew(answer, small_store, tmp_path, of):
    run = tmp_path / "runs" / "tiny"
    folder = run / "stages" / "tiny_512" / "checkpoints" / "step=20"
    _write_checkpoint(folder, small_store)
    (folder / "longhaul.json").write_text('{"step": 20, "max_st')
    store = f"data.store={small_store}"
    words = {
        "run": ("run", "--ladder", "tiny", "--store", small_store),
        "pretrain": ("pretrain", "--factory", "tiny_512", store),
        "start": (*PRETRAIN, store, f"resume.start={folder.parent}"),
    }[of]
    said = answer(*words).error()
    assert f"{folder / 'longhaul.json'} is damaged" in said
    assert f"restore it from a copy, or remove the folder {folder} to train again" in said


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


def test_a_start_may_be_the_folder_of_a_stage(answer, small_store, tmp_path):
    stage = tmp_path / "stages" / "tiny_2k"
    _write_checkpoint(stage / "checkpoints" / "step=10", small_store, step=10, max_steps=20)
    said = answer(*PRETRAIN, f"data.store={small_store}", f"resume.start={stage}").error()
    assert "at step 10 of 20" in said


def test_a_length_in_an_override_is_written_as_lengths_are(answer):
    words = (
        "data.seq_length=4K",
        "model.config.seq_length=4K",
        "trainer.callbacks[0].seq_length=4K",
    )
    code, shown, _ = answer(
        *PRETRAIN, *words, "trainer.callbacks[0].tokens_per_batch=4K", "--dryrun"
    )
    assert code == 0
    assert shown.count("seq_length: 4096") == 3


def test_what_is_no_part_of_a_recipe_is_not_written_into_one(answer):
    said = answer(*PRETRAIN, "--debug-comm", "--to-yaml", "x.yaml").error()
    assert "--debug-comm is not part of a recipe; leave it out with --to-yaml" in said


def test_fewer_gpus_than_a_recipe_is_laid_out_for_are_noted(answer):
    words = ("pretrain", "--factory", "llama3_8b_prolong_512k", "trainer.num_nodes=1")
    code, _, said = answer(*words, "--to-yaml", "x.yaml")
    assert code == 0
    assert "is laid out for 32 GPUs and runs on 8" in said


def test_a_store_made_with_another_tokenizer_than_the_checkpoint_is_refused(
    answer, small_store, tmp_path
):
    _write_checkpoint(tmp_path / "start" / "step=20", small_store, tokenizer="f" * 64)
    said = answer(
        *PRETRAIN, f"data.store={small_store}", f"resume.start={tmp_path / 'start'}"
    ).error()
    assert "tokenizer" in said


def test_a_recipe_for_gpus_is_refused_without_them(answer, small_store):
    found = answer("pretrain", "--factory", "llama32_1b_nemo_16k", f"data.store={small_store}")
    assert "needs 8 CUDA GPUs" in found.error()
    assert "loading" not in found.err  # NeMo's import takes longer than the answer should


def test_a_layout_of_cpu_ranks_that_does_not_fit_is_refused_before_anything_is_loaded(answer):
    words = ("--card", "tiny", "--ladder", "tiny", "--stage", "2K", "--device", "cpu")
    found = answer("pretrain", *words, "--layout", "tp3")
    assert "tiny_2k under the layout 'tp3" in found.error()
    assert "loading" not in found.err


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


def _recorded(folder, store, stages):
    """Record stages of the tiny ladder as `longhaul run` does; they are `whole` or `half` done."""
    from longhaul.jobs import ladder_run, local_chain
    from recipes.ladders import LADDERS
    from recipes.models import CARDS
    from recipes.shipped.machines import Machines

    plan = ladder_run.plan(LADDERS["tiny"], CARDS["tiny"], folder / "runs" / "tiny", store)
    resolved = local_chain.stages(plan, ladder_run.rows(plan, Machines()), (), None)
    local_chain.write_records(plan, resolved)
    for stage in resolved:
        if stage.name in stages:
            step = stage.steps if stages[stage.name] == "whole" else stage.steps // 2
            at = stage.checkpoints / f"step={step}"
            _write_checkpoint(at, store, step=step, max_steps=stage.steps)
    return plan.run


def _steps(run, name):
    """Return the steps of a stage by its record."""
    facts = json.loads((run / "stages" / name / "stage.json").read_text())
    return facts["tokens"] // facts["tokens_per_batch"]


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
