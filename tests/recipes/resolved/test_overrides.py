# SPDX-License-Identifier: Apache-2.0
"""What overrides make of a recipe."""

import pytest

from recipes.resolved import overrides
from recipes.shipped import factories


@pytest.mark.parametrize(
    ("words", "interval"),
    [
        ([], 120),
        (["trainer.max_steps=3"], 3),
        (["trainer.max_steps=200"], 120),
        (["trainer.max_steps=3", "trainer.val_check_interval=2"], 2),
    ],
)
def test_a_shorter_stage_is_validated_at_its_end(words, interval):
    recipe = overrides.override(factories.recipe_named("tiny_512"), words)
    assert recipe.trainer.val_check_interval == interval


@pytest.mark.parametrize("right", ["data.store=stores/mine", "optim.config.lr=1e-4"])
def test_the_misspelled_one_of_several_is_named(right):
    with pytest.raises(
        ValueError, match=r"no trainer\.max_stpes; did you mean trainer\.max_steps\?"
    ):
        overrides.override(factories.recipe_named("tiny_512"), [right, "trainer.max_stpes=3"])


def test_a_value_that_cannot_be_is_named_beside_a_right_one():
    words = ["trainer.max_steps=3", "trainer.devices=[1"]
    with pytest.raises(ValueError, match=r"trainer\.devices"):
        overrides.override(factories.recipe_named("tiny_512"), words)


def test_nemo_run_s_log_of_a_wrong_override_is_not_printed(capsys, caplog):
    """Where a job has been started in this process, nemo-run's handler prints to the console."""
    with pytest.raises(ValueError, match=r"did you mean trainer\.max_steps\?"):
        overrides.override(factories.recipe_named("tiny_512"), ["trainer.max_stpes=3"])
    assert not caplog.records
    assert "Error processing" not in "".join(capsys.readouterr())
