# SPDX-License-Identifier: Apache-2.0
"""`status --follow` and `doctor run` of runs that train, hang, die, vanish and are done."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from eval.run_folder import append_step
from longhaul.findings import follow
from longhaul.findings.follow import RunWatch, stage_line
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
        code, out, _ = answer("status", run)
        found = json.loads(answer("status", run, "--json").out)
        doctor = answer("doctor", "run", run)
    assert code == 0
    assert "tiny_2k: straggler since step 5: rank 1 takes 1.50 times as long" in out
    assert "likely cause: heat" in out
    (finding,) = found["stages"][1]["findings"]
    assert finding == {**SLOW.content(), "documents": []}
    assert found["stages"][1]["newest"]["loss"] == 3.0
    assert doctor.code == 1
    assert "straggler since step 5" in doctor.out


def test_a_line_has_the_figures_of_each_gpu_or_of_all(run):
    metrics = stage_folder(run, "tiny_2k") / "metrics.jsonl"
    step = {
        "step": 11, "loss": 2.5, "seconds": 2.0, "tokens_per_second_per_rank": 2048.0,
        "device_memory_bytes": 2**31, "gpu_utilization": 96.5,
    }  # fmt: skip
    of_each = {"device_memory_bytes_by_rank": [2**30, 2**31], "gpu_utilization_by_rank": [98, 95]}
    append_step(metrics, step | of_each)
    watched = RunWatch(run)
    with training(run):
        assert stage_line(watched.look().stages[1]) == (
            "tiny_2k  running  step 11/40  loss 2.500  tokens/s/rank 2,048  memory 1.0 2.0 GiB  "
            "GPUs busy 98 95 %  saved step 8  left 58 s"
        )
        many = {"device_memory_bytes_by_rank": {"max": 2**31, "median": 2**30, "rank": 70}}
        append_step(metrics, step | {"step": 12} | many)
        assert "memory 2.0 GiB  GPUs busy 96 %" in stage_line(watched.look().stages[1])


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
    monkeypatch.setattr(follow, "FREE_BYTES", 2**62)  # more than any disk has
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
    assert [one.kind for one in view.stages[1].past_findings] == ["disk_full"]


def test_it_follows_a_run_to_its_end(answer, run, monkeypatch):
    folder, looks, clock = stage_folder(run, "tiny_2k"), iter(range(100)), Clock()
    lock = (folder / "metrics.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def sleep(_: float) -> None:
        at = next(looks)
        if at < 2:
            append_step(folder / "metrics.jsonl", {"step": 11 + at, "loss": 2.9, "seconds": 2.0})
            clock.seconds += (20.0, 19.0)[at]  # a line of steps comes every 20 s
        if at == 0:
            append(folder, [begins(SLOW)])
        if at == 2:
            lock.close()

    clocks = SimpleNamespace(sleep=sleep, monotonic=clock, time=time.time)
    monkeypatch.setattr(follow, "time", clocks)
    code, out, _ = answer("status", run, "--follow")
    assert code == 1
    assert out.splitlines() == [
        "tiny_512  done  step 40/40  loss 3.000  saved step 40",
        "tiny_2k  running  step 10/40  loss 3.000  saved step 8  left 60 s",
        "tiny_2k  running  step 11/40  loss 2.900  saved step 8  left 58 s",
        *(line for line in out.splitlines() if "straggler since" in line),
        "  likely cause: heat", "  to do: look",
        "tiny_2k  stopped  step 12/40  loss 2.900  saved step 8",
        "tiny_2k: ended since step 12: the processes of tiny_2k are gone, at step 12 of 40",
        *(line for line in out.splitlines() if "they were killed" in line or "resumes it" in line),
        "nothing works on this run any more",
    ]  # fmt: skip
    (line,) = answer("status", run, "--follow", "--json").out.splitlines()
    kinds_said = [one["kind"] for one in json.loads(line)["stages"][1]["findings"]]
    assert kinds_said == ["straggler", "ended"]


def test_a_run_that_is_done_ends_it_and_ctrl_c_leaves_a_run_alone(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.0)
    done = make_run(tmp_path / "done", taken=(STEPS, STEPS), saved=(STEPS, STEPS))
    code, out, _ = answer("status", done, "--follow")
    assert (code, out.splitlines()[-1]) == (0, "the run has ended")
    run = make_run(tmp_path / "run")
    with training(run):
        command = [sys.executable, "-m", "longhaul.cli", "status", str(run), "--follow"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "stopped following; the run is not affected" in said


def test_what_is_not_a_run_is_refused_in_a_sentence(answer, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    told = answer("status", tmp_path / "empty", "--follow").error()
    assert "is not a run folder: it has no stages" in told
    assert "is a file" in answer("status", tmp_path / "file", "--follow").error()
    assert "there is no run folder at" in answer("doctor", "run", tmp_path / "none").error()
    run = make_run(tmp_path / "run")
    assert "has no stage 'tiny_3k'" in answer("doctor", "run", run, "--stage", "tiny_3k").error()


def test_a_look_loads_nothing_heavy(run):
    assert after("doctor", "run", str(run)).returncode == 1


def test_a_stage_with_a_damaged_marker_is_a_finding_and_the_others_are_shown(answer, run):
    marker = stage_folder(run, "tiny_2k") / "checkpoints" / "step=8" / "longhaul.json"
    marker.write_text("{")
    code, out, _ = answer("status", run)
    assert code == 0
    assert "tiny_512" in out
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
    assert kinds(RunWatch(run).look()) == ["ended"]
    append_step(stage_folder(run, "tiny_512") / "metrics.jsonl", {"step": 41, "loss": 3.0})
    code, out, _ = answer("doctor", "run", run, "--stage", "tiny_512")
    assert code == 1
    assert "metrics.jsonl has step 41, and tiny_512 has 40 steps" in out
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


def test_a_run_without_stages_says_so_and_one_with_a_damaged_record_has_not_ended(
    answer, tmp_path, monkeypatch
):
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.0)
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    out = answer("status", run, "--follow").out
    assert out.splitlines() == [
        "no stage has been started here",
        "nothing works on this run any more",
    ]
    (run / "run.json").write_text("{")
    code, out, _ = answer("status", run, "--follow")
    assert code == 1
    assert "broken: " in out
    assert "the run has ended" not in out


def test_a_stage_is_named_by_its_folder_from_within(answer, run, monkeypatch):
    monkeypatch.chdir(stage_folder(run, "tiny_2k"))
    assert "tiny_2k" in answer("status", ".").out
