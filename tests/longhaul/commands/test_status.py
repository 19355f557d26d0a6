# SPDX-License-Identifier: Apache-2.0
"""`longhaul status` of runs that are done, under way, stopped, failed, queued, empty and broken."""

import fcntl
import json
import os
import socket
from datetime import datetime, timezone

import pytest

from eval.run_folder import Evaluation, append_step, evaluation_path, write_json
from longhaul.cli import COMMANDS
from longhaul.jobs.slurm_queue import submitted
from longhaul.run_folder.lock import FILE, in_use, is_locked
from longhaul.run_folder.state import run_state
from longhaul.terminal.pace import Pace, Part, duration, ladder_left
from recipes.spec.naming import stage_folder
from tests.longhaul.test_light_commands import after

NAMES = ("tiny_512", "tiny_2k")
STEPS, TOKENS = 40, 8192


def make_run(run, *, taken=(40, 10), saved=(40, 8)):
    """Write a run folder of two stages with so many steps taken and saved."""
    write_json(run / "run.json", {"ladder": "tiny", "card": "tiny", "stages": NAMES})
    for name, steps, step in zip(NAMES, taken, saved, strict=True):
        folder = stage_folder(run, name)
        write_json(
            folder / "stage.json",
            {
                "name": name, "seq_length": 512, "tokens": STEPS * TOKENS,
                "tokens_per_batch": TOKENS,
            },
        )  # fmt: skip
        for number in range(1, steps + 1):
            append_step(folder / "metrics.jsonl", {"step": number, "loss": 3.0, "seconds": 2.0})
        if step:
            facts = {"step": step, "max_steps": STEPS, "tokenizer": "x"}
            write_json(folder / "checkpoints" / f"step={step}" / "longhaul.json", facts)
    return run


def states(run):
    return {stage.name: stage.state for stage in run_state(run).stages}


def test_each_stage_says_state_step_tokens_checkpoint_and_what_is_left(answer, tmp_path):
    run = make_run(tmp_path / "run")
    write_json(evaluation_path(run, "tiny_512"), {})
    code, out, _ = answer("status", run)
    assert code == 0
    first, second = (line for line in out.splitlines() if " tiny_" in line and "/" in line)
    assert [word for word in first.split() if word.isascii()] == [
        "tiny_512", "done", "40/40", "328K/328K", "step", "40", "yes",
    ]  # fmt: skip
    assert "stopped" in second
    assert "10/40" in second
    assert "64 s" in second
    assert "step 8" in second
    assert "about 64 s of training left" in out


def test_all_of_it_in_numbers(answer, tmp_path):
    run = make_run(tmp_path / "run")
    code, out, _ = answer("status", run, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["card"], found["ladder"], found["seconds_left"]) == ("tiny", "tiny", 64.0)
    assert found["stages"][1]["checkpoint_step"] == 8
    assert found["stages"][1]["tokens_planned"] == STEPS * TOKENS
    assert found["holders"] == []


def test_the_last_evaluation_of_a_stage_that_trains_is_shown(answer, tmp_path):
    run = make_run(tmp_path / "run")
    metrics = stage_folder(run, "tiny_2k") / "metrics.jsonl"
    measured = {
        "heldout_loss": 3.1, "heldout_by_quarter": [3.4, 3.2, 3.0, 2.8],
        "heldout_by_length": {"64": 3.9, "1024": 3.3}, "passkey_nats": 2.25,
        "evaluation_seconds": 0.5,
    }  # fmt: skip
    for step, loss in ((11, 3.6), (12, 3.1)):
        measured["heldout_loss"] = loss
        append_step(metrics, {"step": step, "loss": 3.0, "seconds": 2.0, **measured})
    append_step(metrics, {"step": 13, "loss": 3.0, "seconds": 2.0})
    with metrics.open("a") as file:
        file.write('{"step": 14, "heldout_loss": 1.0, "hel')  # cut by a kill
    out = answer("status", run).out
    assert "tiny_2k at step 12: held-out loss 3.100, passkey 2.25 nats per token" in out
    assert "  by quarter of the window: 3.400 3.200 3.000 2.800" in out
    assert "  by tokens of a whole document: 3.900 from 64, 3.300 from 1,024" in out
    assert "tiny_512 at step" not in out
    first, second = json.loads(answer("status", run, "--json").out)["stages"]
    assert first["while_training"] is None
    assert {name: second["while_training"][name] for name in measured} == measured


def test_a_stage_whose_log_is_locked_runs(tmp_path):
    run = make_run(tmp_path / "run")
    lock = stage_folder(run, "tiny_2k") / "metrics.lock"
    with lock.open("w") as file:
        assert not is_locked(lock)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert states(run) == {"tiny_512": "done", "tiny_2k": "running"}
    assert states(run)["tiny_2k"] == "stopped"


def test_the_stage_that_a_local_run_is_at_runs_while_its_ranks_start(answer, tmp_path):
    run = make_run(tmp_path / "run", taken=(10, 0), saved=(8, 0))
    with in_use(run):
        assert states(run) == {"tiny_512": "running", "tiny_2k": "waiting"}
        out, err = answer("status", run)[1:]
    assert f"in use by process {os.getpid()} on {socket.gethostname()} (" in out
    assert "resumes it" not in err
    with in_use(stage_folder(run, "tiny_2k")):
        assert states(run) == {"tiny_512": "stopped", "tiny_2k": "running"}
    assert states(run) == {"tiny_512": "stopped", "tiny_2k": "waiting"}
    assert "resumes it" in answer("status", run).err


def test_a_run_that_has_saved_nothing_starts_again(answer, tmp_path):
    run = make_run(tmp_path / "run", taken=(10, 0), saved=(0, 0))
    told = answer("status", run).err
    assert "the command that started the run starts it again; no checkpoint is complete" in told


def test_a_run_that_is_being_evaluated_says_so_and_not_how_to_evaluate_it(answer, tmp_path):
    run = make_run(tmp_path / "run", taken=(40, 40), saved=(40, 40))
    _, shown, said = answer("status", run)
    assert "all stages are trained" in shown
    assert "longhaul evaluate" in said
    with in_use(run / "eval"):
        _, shown, said = answer("status", run)
    assert shown.startswith(f"eval: in use by process {os.getpid()} ")
    assert "all stages are trained" in shown
    assert "longhaul evaluate" not in said


def test_a_process_that_was_killed_or_whose_number_is_another_s_now_holds_nothing(tmp_path):
    run = make_run(tmp_path / "run")
    killed = {"host": socket.gethostname(), "process": os.getpid(), "command": "longhaul run"}
    for since in ("2020-01-01T00:00:00+00:00", "noon", None):
        (run / FILE).write_text(json.dumps({**killed, "since": since}))
        assert states(run)["tiny_2k"] == "stopped"
    (run / FILE).write_text("")
    assert states(run)["tiny_2k"] == "stopped"


def test_a_file_system_without_locks_has_the_process_of_the_file(tmp_path):
    run = make_run(tmp_path / "run")
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    (run / FILE).write_text(json.dumps(record))
    assert states(run)["tiny_2k"] == "running"


def test_a_run_of_another_machine_is_in_use_there(answer, tmp_path):
    run = make_run(tmp_path / "run")
    record = {"host": "n7", "process": 41, "command": "longhaul run", "since": "noon"}
    (run / FILE).write_text(json.dumps(record))
    assert states(run) == {"tiny_512": "done", "tiny_2k": "in use"}
    code, out, err = answer("status", run)
    assert code == 0
    assert " in use on n7 " in out
    assert "in use by process 41 on n7 (longhaul run, since noon); this machine cannot see" in out
    assert "resumes it" not in err
    assert run_state(run).seconds_left == 60.0  # it trains: from its last step


@pytest.mark.parametrize(
    ("word", "state"),
    [("failed the loss broke", "failed"), ("refused the gate is shut", "failed"),
     ("continue told to stop", "stopped")],
)  # fmt: skip
@pytest.mark.parametrize("place", ["outcome", "launch/outcomes/tiny_2k"])
def test_the_word_that_a_job_left_says_how_it_ended(tmp_path, word, state, place):
    run = make_run(tmp_path / "run")
    path = stage_folder(run, "tiny_2k") / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(word + "\n")
    stage = run_state(run).stages[1]
    assert (stage.state, stage.reason) == (state, word.partition(" ")[2])


@pytest.mark.parametrize(
    ("slurm", "state"),
    [("RUNNING", "running"), ("PENDING", "queued"), ("TIMEOUT", "failed"), ("", "stopped")],
)
def test_a_job_of_slurm_is_asked_for(answer, tmp_path, monkeypatch, slurm, state):
    run = make_run(tmp_path / "run")
    write_json(run / "launch" / "jobs.json", {"tiny_2k": "11", "evaluate_tiny_2k": "12"})
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("squeue", "sacct"):
        (programs / name).write_text(f"#!/bin/sh\nprintf '11|{slurm}\\n12|PENDING\\n'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert states(run)["tiny_2k"] == state
    _, out, err = answer("status", run)
    assert "job 12 evaluate_tiny_2k: pending" in out
    assert f"11 {slurm.lower() or 'not known to Slurm'}" in out
    assert ("Slurm does not know its job 11" in out) == (slurm == "")
    assert ("resumes it" in err) == (slurm == "TIMEOUT")


@pytest.mark.parametrize(
    ("queued", "ended", "state"),
    [
        (["11_[1-3]|PENDING"], ["11_0|COMPLETED"], "pending"),
        (["11_2|RUNNING", "11_3|PENDING"], ["11_0|FAILED"], "running"),
        ([], ["11_0|COMPLETED", "11_1|FAILED", "11_2|COMPLETED"], "failed"),
        ([], ["11_0|COMPLETED", "11_1|COMPLETED"], "completed"),
    ],
    ids=str,
)
def test_the_jobs_of_an_array_have_one_state(tmp_path, monkeypatch, queued, ended, state):
    run = make_run(tmp_path / "run")
    write_json(run / "launch" / "jobs.json", {"prepare_parts": "11"})
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, lines in (("squeue", queued), ("sacct", ended)):
        (programs / name).write_text("#!/bin/sh\n" + "".join(f"echo '{one}'\n" for one in lines))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (job,) = submitted(run)
    assert (job.words, job.is_live) == (state, state in ("pending", "running"))


@pytest.mark.parametrize(
    ("squeue", "why"),
    [
        (None, "there is no squeue on this machine"),
        (
            "echo 'Unable to contact slurm controller' >&2; exit 1",
            "squeue fails (Unable to contact slurm controller)",
        ),
    ],
)
def test_a_job_that_slurm_cannot_be_asked_for_is_not_called_stopped(
    answer, tmp_path, monkeypatch, squeue, why
):
    run = make_run(tmp_path / "run")
    write_json(run / "launch" / "jobs.json", {"tiny_2k": "11"})
    programs = tmp_path / "programs"
    programs.mkdir()
    if squeue is not None:
        (programs / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
        (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    stage = run_state(run).stages[1]
    assert stage.state == "unknown"
    assert f"Slurm was not asked for its job 11: {why}" in stage.reason
    _, out, err = answer("status", run)
    assert "11 not asked" in out
    assert "resumes it" not in err


def test_a_stage_that_has_not_begun_waits_and_is_counted(tmp_path):
    found = run_state(make_run(tmp_path / "run", taken=(20, 0), saved=(20, 0)))
    assert [stage.state for stage in found.stages] == ["stopped", "waiting"]
    assert found.seconds_left == 20 * 2.0 + STEPS * 2.0


def test_what_is_left_of_a_stopped_stage_counts_from_its_checkpoint(tmp_path):
    run = make_run(tmp_path / "run", taken=(20, 0), saved=(12, 0))
    first, second = run_state(run).stages
    assert (first.state, first.step) == ("stopped", 20)
    assert first.seconds_left == (STEPS - 12) * 2.0
    nothing_saved = make_run(tmp_path / "other", taken=(20, 0), saved=(0, 0))
    assert run_state(nothing_saved).stages[0].seconds_left == STEPS * 2.0
    assert second.state == "waiting"


def test_a_run_in_which_nothing_has_begun_says_so_and_an_empty_folder_is_no_run(answer, tmp_path):
    (tmp_path / "run" / "launch").mkdir(parents=True)
    code, out, _ = answer("status", tmp_path / "run")
    assert (code, "no stage has been started here" in out) == (0, True)
    (tmp_path / "empty").mkdir()
    told = answer("status", tmp_path / "empty").error()
    assert "is not a run folder: it has no stages; name the folder that `longhaul run` or" in told


def test_the_folder_of_a_stage_is_taken_for_its_run_and_one_of_runs_is_refused(answer, tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    shown = answer("status", run).out
    assert answer("status", stage_folder(run, "tiny_2k")).out == shown
    told = answer("status", tmp_path / "runs").error()
    assert f"{tmp_path / 'runs'} is not a run folder; name one of the runs in it: first" in told


def test_a_place_that_is_no_folder_is_refused(answer, tmp_path):
    assert "no run folder at" in answer("status", tmp_path / "nowhere").error()


@pytest.mark.parametrize(
    "broken", ["run.json", "launch/jobs.json", "stages/tiny_2k/stage.json"], ids=str
)
def test_a_broken_file_is_named_and_the_rest_is_shown(answer, tmp_path, broken):
    run = make_run(tmp_path / "run")
    (run / broken).parent.mkdir(exist_ok=True)
    (run / broken).write_text('{"cut')
    code, out, _ = answer("status", run)
    assert code == 0
    assert f"{run / broken} is not JSON" in " ".join(out.split())
    assert "tiny_512" in out
    assert ("tiny on ladder tiny" in out) == (broken != "run.json")


@pytest.mark.parametrize("facts", [{"max_steps": "abc"}, {"max_steps": None}, {"step": "abc"}])
def test_a_checkpoint_s_marker_without_numbers_breaks_its_stage_alone(answer, tmp_path, facts):
    run = make_run(tmp_path / "run")
    marker = stage_folder(run, "tiny_2k") / "checkpoints" / "step=8" / "longhaul.json"
    write_json(marker, {"step": 8, "max_steps": STEPS, "tokenizer": "x", **facts})
    assert states(run) == {"tiny_512": "done", "tiny_2k": "broken"}
    (name,) = facts
    out = answer("status", run).out
    assert f"tiny_2k: damaged since step 10: {marker} is damaged ('{name}' is" in out
    write_json(marker.parents[1] / "step=4" / "longhaul.json",
               {"step": 4, "max_steps": STEPS, "tokenizer": "x"})  # fmt: skip
    assert states(run)["tiny_2k"] == "broken"


def test_a_record_without_tokens_and_an_unreadable_word_do_not_end_the_command(tmp_path):
    run = make_run(tmp_path / "run", taken=(40, 1), saved=(40, 0))
    write_json(stage_folder(run, "tiny_2k") / "stage.json", {
        "name": "tiny_2k", "seq_length": 512, "tokens_per_batch": TOKENS,
    })  # fmt: skip
    assert states(run)["tiny_2k"] == "stopped"
    (stage_folder(run, "tiny_2k") / "outcome").write_bytes(b"\xff")
    assert states(run)["tiny_2k"] == "broken"


def test_columns_that_a_narrow_terminal_lacks_are_lines(answer, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setenv("COLUMNS", "60")
    out = answer("status", run).out
    said = "tokens 81.9K/328K"
    assert "tokens" not in out.partition("done")[0]
    assert any(line.startswith("tiny_2k: ") and said in line for line in out.splitlines())
    assert "evaluated no" in out


def test_an_evaluation_of_an_earlier_checkpoint_has_its_step(answer, tmp_path):
    run = make_run(tmp_path / "run")
    for name, step in zip(NAMES, (40, 4), strict=True):
        found = Evaluation(name, 512, 512, 24, 24 * 512, step=step)
        write_json(evaluation_path(run, name), found)
    shown = answer("status", run).out.splitlines()
    first, second = (line for line in shown if " tiny_" in line and "/" in line)
    assert "yes" in first
    assert "at step 4" in second


def test_metrics_that_are_garbage_are_no_steps(tmp_path):
    run = make_run(tmp_path / "run", saved=(40, 0))
    (stage_folder(run, "tiny_2k") / "metrics.jsonl").write_bytes(b"\xff\x00 garbage\n[1]\n")
    assert states(run) == {"tiny_512": "done", "tiny_2k": "waiting"}


def test_a_damaged_marker_is_named_by_status_and_report(answer, tmp_path):
    run = make_run(tmp_path / "run")
    marker = stage_folder(run, "tiny_2k") / "checkpoints" / "step=8" / "longhaul.json"
    marker.write_text("{")
    assert states(run) == {"tiny_512": "done", "tiny_2k": "broken"}
    code, out, _ = answer("status", run)
    assert code == 0
    assert f"damaged since step 10: {marker} is damaged" in " ".join(out.split())
    code, _, said = answer("report", "--run", run)
    assert code == 0
    assert f"{marker} is damaged" in " ".join(said.split())


def test_it_loads_nothing_heavy(tmp_path):
    assert "status" in COMMANDS
    done = after("status", str(make_run(tmp_path / "run")))
    assert done.returncode == 0, done.stderr


def test_a_stage_without_a_pace_leaves_the_rest_unknown_unless_one_before_it_has_one():
    known = Part(10, 100.0, Pace(5, 2.0))
    assert ladder_left([known, Part(10, 100.0, Pace.of([]))]) == 5 * 2.0 + 10 * 2.0
    unknown = ladder_left([Part(10, 100.0, Pace.of([]))])
    assert unknown != unknown


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.4, "4 s"), (600, "10 min"), (3 * 3600 + 300, "3 h 05 min"), (200_000, "2 d 7 h")],
)
def test_durations_are_read_in_their_largest_units(seconds, words):
    assert duration(seconds) == words
