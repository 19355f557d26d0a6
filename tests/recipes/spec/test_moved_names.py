# SPDX-License-Identifier: Apache-2.0
"""Recipes that an earlier version wrote."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from recipes.resolved import yaml_file
from recipes.spec.moved_names import MODULES, current_name

GOLDEN = Path(__file__).parents[2] / "golden" / "recipes"
EARLIER = {today: before for before, today in MODULES.items()}


def as_before(text: str) -> str:
    """Return a recipe in YAML as it was written before modules moved."""

    def target(found: re.Match[str]) -> str:
        module, _, name = found[1].rpartition(".")
        return f"_target_: {EARLIER.get(module, module)}.{name}\n"

    return re.sub(r"_target_: (.+)\n", target, text)


@pytest.mark.parametrize(
    "name", ["tiny_8k", "llama31_8b_ultralong_1m", "llama3_8b_longrecipe_128k"]
)
def test_a_recipe_of_an_earlier_version_is_read_as_today_s(name, tmp_path):
    golden = GOLDEN / f"{name}.yaml"
    before = tmp_path / "config.yaml"
    before.write_text(as_before(golden.read_text()))
    assert "_target_: recipes.gpt.LongContext" in before.read_text()
    assert yaml_file.read(before) == yaml_file.read(golden)


def test_every_class_of_ours_in_a_recipe_has_its_earlier_name():
    text = "".join(path.read_text() for path in GOLDEN.glob("*.yaml"))
    own = set(re.findall(r"_target_: ((?:recipes|custom_modules|data)\.[\w.]+)\.\w+\n", text))
    later = {"data.mixture.config", "custom_modules.rope.layers"}
    assert own - set(EARLIER) - later == {  # which no earlier version had
        f"custom_modules.callbacks.{name}"
        for name in (
            "collective_timeout", "hang_guard", "loss_guard", "step_log", "stop_in_time",
            "stragglers",
        )
    }  # fmt: skip


def test_every_moved_class_is_where_its_name_says():
    for name in ("recipes.weight_sums.WeightSums", "recipes.schedule.WarmupCosine"):
        module, _, attribute = current_name(name).rpartition(".")
        assert hasattr(import_module(module), attribute)


def test_a_name_that_has_not_moved_stays():
    name = "custom_modules.callbacks.step_log.StepLog"
    assert current_name(name) == name
