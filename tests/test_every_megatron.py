# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import every_megatron
from tests.every_megatron import TREE, Outcome, older_than, outcome, python312, sections

RESULT = """<testsuites><testsuite time="12.5">
<testcase classname="tests.custom_modules.gpt.test_model" name="test_a"/>
<testcase classname="tests.custom_modules.gpt.test_model" name="test_b">
<failure message="ValueError: one&#10;TypeError: two|three"/></testcase>
<testcase classname="tests.custom_modules.rope.test_rotary" name="test_c"><skipped/></testcase>
</testsuite></testsuites>"""
FAILED = "tests/custom_modules/gpt/test_model.py::test_b"


def test_a_result_is_read_by_test_and_shown_by_folder():
    read = outcome("0.19.2", ElementTree.fromstring(RESULT))
    assert read.passed == ["tests/custom_modules/gpt/test_model.py::test_a"]
    assert read.failed == {FAILED: "TypeError: two|three"}
    shown = "\n".join(sections([read], ""))
    assert "| gpt | 1 / 1 |" in shown
    assert "| skipped | 1 |" in shown
    assert "two\\|three" in shown


def test_a_failure_without_a_reason_and_a_reason_without_a_failure_are_surprises(monkeypatch):
    read = outcome("0.19.2", ElementTree.fromstring(RESULT))
    assert [*read.surprises()] == [f"{FAILED} fails: TypeError: two|three"]
    monkeypatch.setattr(every_megatron, "LEFT", {FAILED: "known"})
    assert [*read.surprises()] == []
    assert [*Outcome("0.19.2", [FAILED], {}, 0, 1.0).surprises()] == [
        f"{FAILED} passes, and LEFT names it"
    ]
    assert [*Outcome("0.15.3", [FAILED], {}, 0, 1.0).surprises()] == []


@pytest.mark.parametrize(("release", "older"), [("0.15.3", True), ("0.17.0", False)])
def test_releases_are_compared_by_their_number(release, older):
    assert older_than(release, 17) is older


@pytest.mark.parametrize("word", ["", "0.x", "latest", "0.19.2.1", "0.19; true"])
def test_a_version_that_is_none_is_refused_in_one_sentence(word, capsys):
    assert every_megatron.main([word]) == 2
    said = capsys.readouterr().err
    assert f"error: VERSION {word!r} is not a release of Megatron-Core" in said
    assert len(said.splitlines()) == 1


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="the named Python must be another")
def test_another_python_is_refused_by_its_number():
    with pytest.raises(ValueError, match=r"is Python 3\.1[01]\.\d+; Megatron-Core 0\.17 and later"):
        python312(sys.executable)


def test_what_is_not_run_is_there():
    assert all(Path(TREE, name).exists() for name in every_megatron.WITHOUT)
