# SPDX-License-Identifier: Apache-2.0
"""The guide's table of public suites names the harness's tasks and their data sets."""

import re

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra eval, is not installed")

from eval.harness.tasks import find
from tests.eval.harness.test_tasks import TREE


@pytest.mark.nightly  # the harness reads all of its tasks, whose names change with its pin alone
def test_the_names_in_the_guide_are_those_of_the_harness_and_of_its_data_sets():
    lines = (TREE / "docs" / "guide.md").read_text().splitlines()
    start = lines.index("| name | data set on the Hugging Face Hub |") + 2
    rows = [line.split("|")[1:3] for line in lines[start : lines.index("", start)]]
    made = {name: named(row[1])[0] for row in rows for name in named(row[0])}
    assert len(made) == 7
    tasks, _, manager = find([name for name in made if name != "ruler"], None)
    assert "ruler" in manager.task_index
    sets = {task.config.get("dataset_path") or task.config["class"].DATASET_PATH for task in tasks}
    assert sets == {made[name] for name in made if name != "ruler"}


def named(cell: str) -> list[str]:
    return re.findall("`(.+?)`", cell)
