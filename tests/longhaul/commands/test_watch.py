# SPDX-License-Identifier: Apache-2.0
"""`longhaul watch` and `longhaul doctor run` of runs that train, hang, die, vanish and are done."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rich.console import Console

from eval.run_folder import append_step
from longhaul.commands import watch
from longhaul.pages.watch_page import page, sparkline
from longhaul.run_folder import run_view
from longhaul.run_folder.run_view import RunWatch
from longhaul.terminal.console import plain_console
from recipes.spec.finding import Finding, append, begins
from recipes.spec.naming import stage_folder
from tests.longhaul.commands.test_status import STEPS, make_run
from tests.longhaul.test_light_commands import after

SLOW = Finding(
    kind="straggler", step=5, said="rank 1 takes 1.50 times as long", cause="heat", remedy="look",
    ranks=(1,),
)  # fmt: skip


@contextmanager
def training(run, name="tiny_2k"):
    """Hold the lock that the rank of a stage holds while it trains."""
    with (stage_folder(run, name) / "metrics.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


class Clock:
    """A monotonic clock that a test moves."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def kinds(view) -> list[str]:
    return [finding.kind for _, finding in view.all_findings]


def test_a_look_at_a_run_that_trains_has_its_figures_and_its_findings(answer, run):
    append(stage_folder(run, "tiny_2k"), [begins(SLOW)])
    with training(run):
        code, out, _ = answer("watch", run, "--once")
        found = json.loads(answer("watch", run, "--once", "--json").out)
        of_stage = json.loads(answer("watch", run / "stages" / "tiny_2k", "--once", "--json").out)
        doctor = answer("doctor", "run", run)
    assert code == 0
    assert "tiny_512  done  step 40/40" in out
    assert "tiny_2k  running  step 10/40  loss 3.000" in out
    assert "tiny_2k: straggler since step 5: rank 1 takes 1.50 times as long" in out
    assert "likely cause: heat" in out
    assert found["stages"][1]["findings"] == [SLOW.content()]
    assert [stage["name"] for stage in of_stage["stages"]] == ["tiny_2k"]
    assert doctor.code == 1
    assert "straggler since step 5" in doctor.out


def test_the_page_of_a_terminal_has_curve_figures_and_findings(run):
    append(stage_folder(run, "tiny_2k"), [begins(SLOW)])
    append_step(
        stage_folder(run, "tiny_2k") / "metrics.jsonl",
        {
            "step": 11, "loss": 2.5, "seconds": 2.0, "tokens_per_second_per_rank": 2048.0,
            "mfu": 0.41, "data_wait_seconds": 0.1, "forward_seconds": 0.7, "backward_seconds": 1.2,
            "device_memory_bytes_by_rank": [2**30, 2**31],
        },
    )  # fmt: skip
    console = plain_console(io.StringIO(), width=100, force_terminal=True)
    with training(run):
        console.print(page(RunWatch(run).look(), console))
    text = console.file.getvalue()
    for words in (
        "2,048", "41.0%", "data 5%, forward 35%, backward 60%", "1.0 2.0 GiB by rank", "11/40",
        "straggler since step 5", "to do: look",
    ):  # fmt: skip
        assert words in text
    assert sparkline([1, 2, 3, 4], 2, "_#") == "_#"
    assert sparkline([2.0], 8, "_#") == "_"
    assert sparkline([], 8, "_#") == ""


def test_a_stage_that_writes_nothing_for_long_hangs_whatever_the_clock_of_its_files_says(run):
    clock = Clock()
    file = stage_folder(run, "tiny_2k") / "metrics.jsonl"
    os.utime(file, (time.time() + 9e5, time.time() + 9e5))  # a clock that is ten days ahead
    watched = RunWatch(run, now=clock)
    with training(run):
        assert kinds(watched.look()) == []
        clock.seconds += 299
        assert kinds(watched.look()) == []
        clock.seconds += 2
        assert kinds(watched.look()) == ["hang"]
        append_step(file, {"step": 11, "loss": 3.0, "seconds": 2.0})
        assert kinds(watched.look()) == []


def test_a_stage_whose_processes_are_gone_has_ended_and_one_that_is_done_has_not(run):
    watched = RunWatch(run)
    with training(run):
        assert watched.look().is_at_work
    view = watched.look()
    assert not view.is_at_work
    assert kinds(view) == ["ended"]
    assert "at step 10 of 40" in view.all_findings[0][1].said


def test_a_folder_that_vanishes_is_a_finding_until_it_comes_back(run, tmp_path):
    watched = RunWatch(run)
    with training(run):
        assert kinds(watched.look()) == []
        run.rename(tmp_path / "away")
        lost = watched.look()
        assert kinds(lost) == ["folder_lost"]
        assert lost.is_at_work
        run.mkdir()  # the empty folder of a mount point
        assert kinds(watched.look()) == ["folder_lost"]
        run.rmdir()
        (tmp_path / "away").rename(run)
        assert kinds(watched.look()) == []


def test_a_file_system_without_room_is_named_while_a_stage_is_left(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_view, "FREE_BYTES", 2**62)  # more than any disk has
    with training(run):
        (name, finding), *_ = RunWatch(run).look().all_findings
    assert (name, finding.kind) == ("", "disk_full")
    done = make_run(tmp_path / "done", taken=(STEPS, STEPS), saved=(STEPS, STEPS))
    assert kinds(RunWatch(done).look()) == []


def test_an_event_holds_until_a_step_is_taken_after_it(run):
    folder = stage_folder(run, "tiny_2k")
    append(folder, [begins(Finding(kind="disk_full", step=10, said="full"))])
    watched = RunWatch(run)
    assert kinds(watched.look()) == ["disk_full"]
    with training(run):
        append_step(folder / "metrics.jsonl", {"step": 11, "loss": 3.0, "seconds": 2.0})
        view = watched.look()
    assert kinds(view) == []
    assert [one.kind for one in view.stages[1].past] == ["disk_full"]


def test_it_follows_a_run_in_a_pipe_to_its_end_and_alerts(answer, run, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "PLAIN_EVERY_SECONDS", 0.0)
    folder, looks = stage_folder(run, "tiny_2k"), iter(range(100))
    lock = (folder / "metrics.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def sleep(_: float) -> None:
        at = next(looks)
        if at == 0:
            append_step(folder / "metrics.jsonl", {"step": 11, "loss": 2.9, "seconds": 2.0})
            append(folder, [begins(SLOW)])
        if at == 1:
            lock.close()

    clocks = SimpleNamespace(sleep=sleep, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(watch, "time", clocks)
    code, out, _ = answer("watch", run, "--alert", f"sh -c 'cat >> {tmp_path}/alerts'")
    assert code == 1
    lines = out.splitlines()
    assert any(line.startswith("tiny_2k  step 11/40  loss 2.900") for line in lines)
    assert lines[-1] == "nothing works on this run any more"
    assert "tiny_2k: straggler since step 5: rank 1 takes 1.50 times as long" in lines
    end = time.monotonic() + 20
    while len(alerts := _lines(tmp_path / "alerts")) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert [(one["kind"], one["stage"]) for one in alerts] == [
        ("straggler", "tiny_2k"), ("ended", "tiny_2k"),
    ]  # fmt: skip


def _lines(path) -> list[dict]:
    return [json.loads(line) for line in path.open()] if path.exists() else []


def test_a_run_that_is_done_ends_it_and_ctrl_c_leaves_a_run_alone(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.0)
    done = make_run(tmp_path / "done", taken=(STEPS, STEPS), saved=(STEPS, STEPS))
    code, out, _ = answer("watch", done)
    assert (code, out.splitlines()[-1]) == (0, "the run has ended")
    run = make_run(tmp_path / "run")
    with training(run):
        command = [sys.executable, "-m", "longhaul.cli", "watch", str(run)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopped watching; the run goes on" in said


def test_what_is_not_a_run_is_refused_in_a_sentence(answer, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert "is not a run folder: it has no stages" in answer("watch", tmp_path / "empty").error()
    assert "is a file" in answer("watch", tmp_path / "file").error()
    assert "there is no run folder at" in answer("doctor", "run", tmp_path / "none").error()
    of_a_stage = ("watch", tmp_path / "none", "--stage", "512", "--once")
    assert "there is no run folder at" in answer(*of_a_stage).error()
    run = make_run(tmp_path / "run")
    assert "has no stage 'tiny_3k'" in answer("watch", run, "--stage", "tiny_3k").error()
    assert "--alert starts nothing_here" in answer("watch", run, "--alert", "nothing_here").error()


def test_watching_loads_nothing_heavy(run):
    assert after("watch", str(run), "--once").returncode == 0
    assert after("doctor", "run", str(run)).returncode == 1


def test_a_stage_with_a_damaged_marker_is_a_finding_and_the_others_are_shown(answer, run):
    marker = stage_folder(run, "tiny_2k") / "checkpoints" / "step=8" / "longhaul.json"
    marker.write_text("{")
    code, out, _ = answer("watch", run, "--once")
    assert code == 0
    assert "tiny_512  done  step 40/40" in out
    assert "tiny_2k  broken  step 10/?" in out
    assert out.count(f"{marker} is damaged") == 1
    code, out, _ = answer("doctor", "run", run)
    assert code == 1
    assert f"damaged since step 10: {marker} is damaged" in out


def test_the_doctor_says_how_a_rank_ended_that_rank_0_only_lost(answer, run):
    folder = stage_folder(run, "tiny_2k")
    lost = "rank 0 lost the connection to another rank, which ended first"
    append(folder, [begins(Finding(kind="failed", step=10, ranks=(0,), said=lost))])
    (folder / "outcome").write_text("failed rank 1 was ended by SIGKILL\n")
    code, out, _ = answer("doctor", "run", run)
    assert code == 1
    assert "  rank 1 was ended by SIGKILL\n  failed since step 10: rank 0 lost" in out
    stage = json.loads(answer("doctor", "run", run, "--json").out)["stages"][1]
    assert stage["reason"] == "rank 1 was ended by SIGKILL"


def test_metrics_of_another_run_are_a_finding_even_if_the_stage_is_done(answer, run):
    assert kinds(RunWatch(run, "tiny_512").look()) == []
    append_step(stage_folder(run, "tiny_512") / "metrics.jsonl", {"step": 41, "loss": 3.0})
    code, out, _ = answer("doctor", "run", run, "--stage", "tiny_512")
    assert code == 1
    assert "metrics.jsonl has step 41, and tiny_512 has 40 steps" in out
    assert "tiny_512  done  step 40/40" in answer("watch", run, "--once").out
    shown = json.loads(answer("status", run, "--json").out)
    assert [stage["step"] for stage in shown["stages"]] == [40, 10]


def test_metrics_with_bytes_that_no_run_writes_are_a_finding(answer, run):
    metrics = stage_folder(run, "tiny_2k") / "metrics.jsonl"
    with metrics.open("ab") as file:
        file.write(b'{"step": 11, "lo\n')  # cut by a kill: nothing to tell
    assert "no finding" in answer("doctor", "run", run).out
    with metrics.open("ab") as file:
        file.write(b"\0\0\0\n\xff\xfe\n")
    code, out, _ = answer("doctor", "run", run)
    assert code == 1
    assert "damaged_metrics since step 10" in out
    assert "bytes that are not UTF-8 in 2 lines" in out


def test_the_command_that_the_page_names_can_be_typed(tmp_path):
    run = make_run(tmp_path / "my run", taken=(40, 40), saved=(40, 40))
    append(stage_folder(run, "tiny_2k"), [begins(SLOW)])
    console = Console(file=io.StringIO(), width=400)
    console.print(page(RunWatch(run).look(), console))
    assert f"1 earlier; longhaul doctor run '{run}' lists them" in console.file.getvalue()


def test_a_run_without_stages_says_so_at_once_and_says_it_once(answer, tmp_path):
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    assert answer("watch", run).out.count("no stage has been started here") == 1
    assert answer("watch", run, "--once").out.count("no stage has been started here") == 1
    console = Console(file=io.StringIO(), width=60)
    console.print(page(RunWatch(run).look(), console))
    assert "no stage has been started here" in console.file.getvalue()


def test_a_damaged_run_record_is_told_and_a_run_without_stages_has_not_ended(answer, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{")
    code, out, _ = answer("watch", run)
    assert code == 1
    assert "broken: " in out
    assert "the run has ended" not in out
    assert json.loads(answer("watch", run, "--once", "--json").out)["trouble"]


def test_a_narrow_terminal_has_a_page(run):
    for width in (20, 12):
        console = Console(file=io.StringIO(), width=width)
        console.print(page(RunWatch(run).look(), console))
        assert "tiny_2k" in console.file.getvalue()


def test_a_stage_is_named_by_its_folder_from_within(answer, run, monkeypatch):
    monkeypatch.chdir(stage_folder(run, "tiny_2k"))
    assert "tiny_2k" in answer("watch", ".", "--once").out
