# SPDX-License-Identifier: Apache-2.0
import time

import pytest

from slurm import outcome


@pytest.fixture
def word(tmp_path, monkeypatch):
    """Return where this process leaves its word."""
    path = tmp_path / "launch" / "stage"
    monkeypatch.setenv(outcome.VARIABLE, str(path))
    return path


def test_a_word_and_its_sentence_are_read_back_as_one_line(word):
    assert outcome.outcome(word) == (None, "")
    outcome.write_outcome("refused", "the gate\nis shut")
    assert outcome.outcome(word) == ("refused", "the gate is shut")
    assert [path.name for path in word.parent.iterdir()] == ["stage"]


def test_what_is_no_word_of_ours_is_none(word):
    word.parent.mkdir()
    word.write_text("perhaps it went well\n")
    assert outcome.outcome(word)[0] is None


def test_without_a_place_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(outcome.VARIABLE, raising=False)
    outcome.write_outcome("finished", "")
    outcome.record_start(3)
    outcome.exclude_node("n1")
    outcome.wait_for_outcome()
    assert list(tmp_path.iterdir()) == []


def test_failures_in_a_row_end_where_an_attempt_began_further_on(word):
    failures = word.with_name("stage.failures")
    outcome.record_start(0)
    failures.write_text("2\n")
    outcome.record_start(0)
    assert failures.read_text() == "2\n"
    outcome.record_start(40)
    assert not failures.exists()


def test_other_ranks_wait_for_the_word_but_not_for_ever(word):
    before = time.monotonic()
    outcome.wait_for_outcome(0.3)
    assert time.monotonic() - before >= 0.3
    outcome.write_outcome("failed", "no port")
    outcome.wait_for_outcome(1_000)
