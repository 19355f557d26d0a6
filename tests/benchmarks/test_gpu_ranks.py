# SPDX-License-Identifier: Apache-2.0
"""Layouts, parity tests and a killed rank of `python -m benchmarks.gpu`, on CPU ranks."""

import re

import pytest

from benchmarks.gpu import killed_rank, ranks
from benchmarks.gpu.sizes import ON_CPU
from benchmarks.harness.kept_ranks import HOST_ID, ON_ONE_GPU
from tests.house.rooms import TREE

PAGE = TREE / "docs" / "ranks_on_one_gpu.md"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_a" name="test_three"><failure message="assert 1 &lt; 0"/></testcase>
<testcase classname="tests.test_b" name="test_four">
<error message="RuntimeError: rank 1 of 2 failed:&#10;Traceback&#10;ValueError: odd"/></testcase>
<testcase classname="tests.test_b" name="test_five">
<error message="RuntimeError: rank 1 of 2 failed:&#10;Traceback&#10;ValueError: odd"/></testcase>
</testsuite></testsuites>
"""


def test_a_report_is_counted_and_an_error_that_repeats_is_told_once(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert ranks._read_report(tmp_path / "report.xml") == {
        "passed": 1,
        "skipped": 1,
        "failed": {
            "tests.test_a::test_three": "assert 1 < 0",
            "tests.test_b::test_four": "RuntimeError: rank 1 of 2 failed: ValueError: odd",
        },
    }


def test_the_page_sets_and_explains_the_variables_of_every_rank():
    page = PAGE.read_text()
    lines = [line.removeprefix("export ") for line in page.splitlines() if line[:7] == "export "]
    given = dict(word.split("=") for line in lines for word in line.split())
    assert given == dict(ON_ONE_GPU)
    assert set(re.findall(r"`([A-Z0-9_]+)(?:=[A-Za-z_0-9]+)?`", page)) >= {HOST_ID, *ON_ONE_GPU}


def result(losses, norms, reason=""):
    return {"losses": losses, "gradient_norms": norms, "reason": reason}


def test_a_layout_agrees_with_one_rank_in_every_step():
    right = result([4.0, 2.0], [1.0, 1.0])
    assert ranks._compared(result([4.0, 2.001], [1.0, 1.009]), right)["agrees"]
    assert not ranks._compared(result([4.01, 2.0], [1.0, 1.0]), right)["agrees"]
    assert not ranks._compared(result([4.0, 2.0], [1.0, 1.02]), right)["agrees"]
    assert not ranks._compared(result([], [], "out of memory"), right)["agrees"]


def test_tensor_ranks_train_as_one_rank_and_a_layout_that_cannot_run_says_why(monkeypatch):
    dense = {"one": {"one rank": ""}, "two": {"TP 2": "tp2", "experts": "dp2 ep2"}}
    monkeypatch.setattr(ranks, "DENSE", dense)
    monkeypatch.setattr(ranks, "WITH_EXPERTS", {})
    noted = []
    found = ranks.ranks(ON_CPU, layouts="two", note=lambda told: noted.append(len(told["layouts"])))
    layouts = found["layouts"]
    assert noted == [1, 2, 3]
    assert layouts["TP 2"]["agrees"], layouts
    assert len(layouts["TP 2"]["losses"]) == ranks.STEPS
    assert layouts["TP 2"]["losses"][-1] < layouts["TP 2"]["losses"][0]
    assert layouts["experts"]["reason"].startswith("ValueError: ")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("layouts", ["two", "four"])
def test_every_layout_trains_as_one_rank(layouts):
    found = ranks.ranks(ON_CPU, layouts=layouts)["layouts"]
    assert {name: one["reason"] for name, one in found.items() if not one["agrees"]} == {}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_resumes_after_a_rank_was_killed():
    parts = killed_rank.killed_run(ON_CPU)["parts"]
    start, resumed = parts["up to the kill"]["losses"], parts["resumed"]
    steps, every = killed_rank.RUN_STEPS["cpu"]
    assert resumed["from_step"] % every == 0
    assert list(resumed["losses"]) == list(range(resumed["from_step"] + 1, steps + 1))
    assert 0 not in parts["until the death is noticed"]["exit_codes"]
    for step in start.keys() & resumed["losses"].keys():
        assert resumed["losses"][step] == pytest.approx(start[step], rel=1e-5)


@pytest.mark.slow
@pytest.mark.nightly
def test_parity_tests_are_counted():
    found = ranks.parity(ON_CPU)
    assert found["failed"] == {}
    assert found["complete"]
    assert found["passed"] > 20
