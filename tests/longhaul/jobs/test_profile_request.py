# SPDX-License-Identifier: Apache-2.0
"""The words of --profile: what they mean, and what a stage refuses."""

from dataclasses import replace

import pytest

from custom_modules.callbacks.profile_steps import ProfileSteps
from custom_modules.callbacks.stragglers import Stragglers
from longhaul.jobs.profile_request import ProfileRequest, nsys_command, require_profile
from longhaul.jobs.profiled_training import add_profile
from longhaul.jobs.training import training_task
from longhaul.jobs.watched_training import train_watched
from recipes.checkpoints.marker import write_marker
from recipes.resolved import read
from recipes.resolved.stage import ResolvedStage
from recipes.shipped.table import ROWS


@pytest.fixture
def stage(tmp_path):
    """Return a stage of two CPU ranks, none of whose steps is trained."""
    recipe = ROWS["tiny_512"]()
    recipe.resume.resume_from_directory = str(tmp_path / "stages" / "tiny_512" / "checkpoints")
    recipe.log.log_dir = str(tmp_path / "stages")
    read.absolute(recipe)
    return ResolvedStage.of(recipe)


def trained(stage, step):
    """Give the stage a complete checkpoint."""
    facts = {"step": step, "max_steps": stage.steps, "tokenizer": "t"}
    write_marker(stage.checkpoints / f"step={step}", facts)


def test_both_ends_of_the_range_are_profiled():
    request = ProfileRequest.of("steps=5:8")
    assert (request.first, request.last, request.ranks) == (5, 8, (0,))
    assert ProfileRequest.of("steps=7").steps == "step 7"
    every = ProfileRequest.of("ranks=all steps=5:8 stack shapes")
    assert (every.ranks, every.stack, every.shapes, every.nsys) == (None, True, True, False)
    assert ProfileRequest.of("steps=1 ranks=3,1,3").ranks == (1, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "names no steps; expected 'steps=5:8'"),
        ("ranks=1", "names no steps"),
        ("steps=8:5", "steps=8:5 is empty; steps are counted from 1"),
        ("steps=0:3", "steps=0:3 is empty"),
        ("steps=5-8", "steps=5-8 is not a range; expected steps=FIRST:LAST"),
        ("steps=5:", "steps=5: is not a range"),
        ("steps=5:8 steps=9", "steps is given twice"),
        ("steps=5:8,ranks=1", "is not a range"),
        ("steps=5 ranks=", "ranks= are not ranks; expected numbers such as ranks=0,1"),
        ("steps=5 ranks=-1", "ranks=-1 are not ranks"),
        ("steps=5 shape", "'shape' is unknown; expected 'steps=5:8'"),
        ("steps=5 stack=1", "'stack=1' is unknown"),
        ("steps=5 nsys stack", "are of PyTorch's trace, which nsys replaces"),
    ],
)
def test_words_that_mean_nothing_are_refused(words, said):
    with pytest.raises(ValueError, match="--profile") as refused:
        ProfileRequest.of(words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("steps=5:9999", "steps and 9,999 is none of them; expected steps from 4 to"),
        ("steps=3:8", "tiny_512 resumes with step 4 and step 3 has been trained"),
        ("steps=4:5 ranks=0,64", "there is no rank 64; tiny_512 is trained by rank"),
        ("steps=4:5 nsys", "leave nsys out: PyTorch's trace is written on both"),
    ],
)
def test_a_stage_refuses_steps_and_ranks_that_it_does_not_have(stage, words, said):
    trained(stage, 3)
    with pytest.raises(ValueError, match="--profile") as refused:
        require_profile([stage], words)
    assert said in str(refused.value)


def test_a_stage_that_is_done_is_not_profiled(stage):
    assert require_profile([stage], None) == []
    assert require_profile([stage], "steps=2:3 ranks=all")[0].startswith(
        "steps 2 to 3 of tiny_512 are profiled on every rank, into "
    )
    trained(stage, stage.steps)
    with pytest.raises(ValueError, match="tiny_512 has all steps, so that nothing is trained"):
        require_profile([stage], "steps=2:3")


def test_a_rank_runs_the_training_that_profiles(stage):
    asked = replace(stage, profile="steps=2:3", evaluate_every=5)
    task = training_task(asked)
    assert (task.__fn_or_cls__, task.profile, task.every) == (train_watched, "steps=2:3", 5)


@pytest.mark.parametrize("words", ["steps=5:8", "steps=5:8 nsys"])
def test_cupti_has_one_reader_in_a_profiled_training_on_gpus(words, tmp_path):
    recipe = ROWS["llama31_8b_nemo_64k"]()
    before = [one.__fn_or_cls__ for one in recipe.trainer.callbacks]
    assert Stragglers in before
    add_profile(recipe, str(tmp_path / "config.yaml"), words)
    after = [one.__fn_or_cls__ for one in recipe.trainer.callbacks]
    assert after == [one for one in before if one is not Stragglers] + [ProfileSteps]


def test_a_job_on_gpus_is_refused_nsys_where_slurm_starts_the_ranks(made):
    assert require_profile(made, "steps=2:3 nsys")
    with pytest.raises(ValueError, match="nsys has to start the ranks itself"):
        require_profile(made, "steps=2:3 nsys", submitted=True)


def test_the_command_of_nsys_that_a_dry_run_prints_is_none_itself(monkeypatch):
    own = ["longhaul", "pretrain", "--factory", "tiny_8k", "--profile", "steps=5:8 nsys"]
    monkeypatch.setattr("sys.argv", [*own, "--dryrun"])
    command = nsys_command("steps=5:8 nsys")
    assert command.endswith("longhaul pretrain --factory tiny_8k --profile 'steps=5:8 nsys'")


def test_the_command_of_nsys_is_this_one_with_nsys_before_it():
    words = "steps=5:8 nsys"
    command = nsys_command(words, ["pretrain", "--factory", "tiny_8k", "--profile", words])
    assert command.startswith("nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi ")
    assert command.endswith("longhaul pretrain --factory tiny_8k --profile 'steps=5:8 nsys'")
    assert nsys_command("steps=5:8") == nsys_command(None) == ""
