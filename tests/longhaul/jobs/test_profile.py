# SPDX-License-Identifier: Apache-2.0
"""The words of --profile: what they mean, and what a stage refuses."""

from dataclasses import replace

import pytest

from custom_modules.callbacks.profile_steps import ProfileSteps
from custom_modules.callbacks.stragglers import Stragglers
from longhaul.jobs.profile import ProfileRequest, add_profile, require_profile
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
    assert str(ProfileRequest.of("steps=7")) == "steps 7 to 7 on ranks 0"
    every = ProfileRequest.of("ranks=all nsys steps=5:8")
    assert (every.ranks, every.nsys) == (None, True)
    assert ProfileRequest.of("steps=1 ranks=3,1,3").ranks == (1, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "names no steps; expected 'steps=5:8'"),
        ("ranks=1", "names no steps"),
        ("steps=8:5", "steps=8:5 is empty; steps are counted from 1"),
        ("steps=0:3", "steps=0:3 is empty"),
        ("steps=5-8", "'steps=5-8' is unknown; expected 'steps=5:8'"),
        ("steps=5:", "'steps=5:' is unknown"),
        ("steps=5:8 steps=9", "'steps=9' is given twice"),
        ("steps=5:8,ranks=1", "is unknown"),
        ("steps=5 ranks=", "'ranks=' is unknown"),
        ("steps=5 ranks=-1", "'ranks=-1' is unknown"),
        ("steps=5 nsys=1", "'nsys=1' is unknown"),
        ("steps=5 stack", "stack is not in this release; docs/profiling.md says"),
    ],
)
def test_words_that_mean_nothing_are_refused(words, said):
    with pytest.raises(ValueError, match="--profile") as refused:
        ProfileRequest.of(words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("steps=5:9999", "steps, of which 3 are trained; expected steps from 4 to"),
        ("steps=3:8", "steps, of which 3 are trained; expected steps from 4 to"),
        ("steps=4:5 ranks=0,64", "there is no rank 64; tiny_512 is trained by ranks 0 to "),
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
        "tiny_512: steps 2 to 3 on ranks all are profiled into "
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
