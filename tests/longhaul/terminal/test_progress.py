# SPDX-License-Identifier: Apache-2.0
"""The one line of progress, as a bar on a terminal and as plain lines elsewhere."""

import io
import json

import pytest
from rich.console import Console

from longhaul.terminal.console import plain_console
from longhaul.terminal.messages import resumable
from longhaul.terminal.pace import last_lines
from longhaul.terminal.progress import Watched, progress, time_left, tokens_done
from recipes.spec.finding import Finding, append, begins, ends
from tests.conditions import until
from tests.longhaul.test_terminal import lines_left


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


def test_the_next_job_has_its_bar_before_its_first_step(tmp_path):
    out = io.StringIO()
    names = ("tiny_512", "tiny_2k", "tiny_8k")
    jobs = [Watched(name, 3, tmp_path / f"{name}.jsonl") for name in names]
    with progress(Console(file=out, force_terminal=True, width=120), jobs):
        until(lambda: "no step yet" in out.getvalue())
        assert "tiny_2k" not in out.getvalue()
        write_steps(jobs[0].metrics, 3)
        until(lambda: "tiny_2k" in out.getvalue())
    assert "0/3" in lines_left(out.getvalue())[1]
    assert "tiny_8k" not in out.getvalue()


def test_a_job_under_way_says_nothing_of_what_comes_after(tmp_path):
    out = io.StringIO()
    jobs = [Watched("tiny_512", 3, tmp_path / "metrics.jsonl")]
    with progress(Console(file=out), jobs, after="evaluating"):
        write_steps(tmp_path / "metrics.jsonl", 2)
    assert "evaluating" not in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_a_new_finding_is_said_with_what_to_do(tmp_path, terminal):
    out = io.StringIO()
    earlier = Finding(kind="spike", step=1, said="a loss of an earlier attempt")
    append(tmp_path, [begins(earlier)])
    console = Console(file=out, force_terminal=terminal, width=120)
    with progress(console, [Watched("tiny_512", 3, tmp_path / "metrics.jsonl")]):
        down = Finding(kind="tracker_down", step=2, said="mlflow is down", remedy="check [it]")
        until(lambda: not append(tmp_path, [begins(down)]) and "mlflow is down" in out.getvalue())
        append(tmp_path, [ends(down, 3), begins(Finding(kind="failed", step=3, said="broken"))])
    shown = out.getvalue()
    assert "warning: tiny_512: mlflow is down; check [it]" in shown
    assert "earlier attempt" not in shown
    assert "broken" not in shown
    assert "it began at" not in shown


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
    assert "".join(time_left(jobs, found, 0)) == "3 min left, about 13 min with all stages"
    assert time_left(jobs[:1], found[:1], 0) == ["3 min left", ""]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60, "19 h 50 min left"),
        (80, "loss 2.345  499M tokens  19 h 50 min left"),
        (100, "loss 2.345  499M tokens  19 h 50 min left"),
        (120, "loss 2.345  499M tokens  19 h 50 min left, about 20 h 03 min with all stages"),
    ],
)
def test_a_line_fits_the_terminal_and_keeps_name_step_and_time_left(tmp_path, width, shown):
    line = {"loss": 2.345, "lr": 1e-5, "tokens_per_second_per_rank": 12345.0, "seconds": 30.0}
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({**line, "step": n + 1}) + "\n" for n in range(119)))
    jobs = [
        Watched("llama31_8b_ultralong_1m", 2500, metrics, 4 * 2**20),
        Watched("the_next", 100, tmp_path / "none.jsonl", 2**20),
    ]
    out = io.StringIO()
    with progress(plain_console(out, force_terminal=True, width=width), jobs):
        pass
    left = lines_left(out.getvalue())
    assert len(left) == 1
    assert f"llama31_8b_ultralong_1m 119/2500 {shown}" in left[0]
    assert len(left[0]) <= width


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_brackets_of_a_name_or_a_message_are_shown(tmp_path, terminal):
    out = io.StringIO()
    console = plain_console(out, force_terminal=terminal)
    jobs = [Watched("[old]_[/old]", 3, tmp_path / "metrics.jsonl")]
    with progress(console, jobs, after="in [/old]"):
        write_steps(tmp_path / "metrics.jsonl", 3)
        until(lambda: "in [/old]" in out.getvalue())
    shown = " ".join(lines_left(out.getvalue()))
    assert "[old]_[/old]" in shown
    assert "in [/old]" in shown


def test_a_stop_ends_with_the_command_that_resumes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["longhaul", "run", "--ladder", "tiny", "--out", "my run"])
    with pytest.raises(KeyboardInterrupt), resumable():
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith(": longhaul run --ladder tiny --out 'my run'\n")


def test_before_the_first_complete_checkpoint_the_command_starts_again(tmp_path, capsys):
    unfinished = tmp_path / "checkpoints" / "step=3"
    (unfinished / "weights").mkdir(parents=True)
    for said, other in (("starts again", "resumes"), ("resumes", "starts again")):
        saves = [tmp_path / "none", unfinished.parent]
        with pytest.raises(KeyboardInterrupt), resumable(saves=saves):
            raise KeyboardInterrupt
        told = capsys.readouterr().err
        assert f"the same command {said}" in told
        assert other not in told
        (unfinished / "longhaul.json").write_text("{}")


def test_a_mistake_says_nothing_of_resuming(capsys):
    with pytest.raises(ValueError, match="no such stage"), resumable():
        raise ValueError("no such stage")
    assert capsys.readouterr().err == ""
