# SPDX-License-Identifier: Apache-2.0
"""The one line of progress, as a bar on a terminal and as plain lines elsewhere."""

import io
import json

import pytest
from rich.console import Console

from longhaul.messages import resumable
from longhaul.pace import last_lines
from longhaul.progress import Watched, progress, time_left, tokens_done
from tests.conditions import until


def write_steps(path, count: int) -> None:
    line = {"loss": 2.5, "lr": 1e-3, "tokens_per_second_per_rank": 1000.0}
    path.write_text("".join(json.dumps(line | {"step": n + 1}) + "\n" for n in range(count)))


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_a_job_that_ends_is_shown_with_its_figures_and_what_comes_after(tmp_path, terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    jobs = [Watched("tiny_512", 3, tmp_path / "metrics.jsonl")]
    with progress(console, jobs, after="evaluating"):
        write_steps(tmp_path / "metrics.jsonl", 3)
        until(lambda: "evaluating" in out.getvalue())
    shown = out.getvalue()
    assert "tiny_512" in shown
    assert "3/3" in shown
    assert "loss 2.500" in shown
    assert shown.count("evaluating") == 1


def test_a_job_under_way_says_nothing_of_what_comes_after(tmp_path):
    out = io.StringIO()
    jobs = [Watched("tiny_512", 3, tmp_path / "metrics.jsonl")]
    with progress(Console(file=out), jobs, after="evaluating"):
        write_steps(tmp_path / "metrics.jsonl", 2)
    assert "evaluating" not in out.getvalue()


def test_a_line_that_is_still_being_written_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert last_lines(path)[-1]["step"] == 2


def test_no_file_is_no_line(tmp_path):
    assert last_lines(tmp_path / "none.jsonl") == []


def test_a_line_says_tokens_and_the_time_left_of_the_stage_and_of_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": n, "loss": 2.5, "seconds": 30.0} for n in range(1, 5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = [
        Watched("tiny_512", 10, path, 1024),
        Watched("tiny_2k", 10, tmp_path / "none.jsonl", 2048),
    ]
    found = [last_lines(job.metrics) for job in jobs]
    assert tokens_done(jobs[0], 4) == "4.1K tokens"
    assert time_left(jobs, found, 0) == "3 min left, about 13 min with all stages"
    assert time_left(jobs[:1], found[:1], 0) == "3 min left"


def test_a_stop_ends_with_the_command_that_resumes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["longhaul", "run", "--ladder", "tiny", "--out", "my run"])
    with pytest.raises(KeyboardInterrupt), resumable():
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith(": longhaul run --ladder tiny --out 'my run'\n")


def test_a_mistake_says_nothing_of_resuming(capsys):
    with pytest.raises(ValueError, match="no such stage"), resumable():
        raise ValueError("no such stage")
    assert capsys.readouterr().err == ""
