# SPDX-License-Identifier: Apache-2.0
"""What a rank records when training ends by an error, and when no step ends."""

import errno
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from custom_modules.callbacks.loss_guard import LossBrokeError
from longhaul.health.on_ranks import HangClock, Health, of_error
from recipes.nemo2 import failed_saves, trackers
from recipes.nemo2.trackers import Trackers
from recipes.spec.finding import Finding, append, begins, read, recorded


def trainer(rank: int = 0) -> SimpleNamespace:
    """Return a trainer as far as the callback looks at it."""
    return SimpleNamespace(
        global_step=12, global_rank=rank, is_global_zero=rank == 0, max_steps=20, callbacks=[]
    )


def failed(folder, error: BaseException, rank: int = 0) -> list[dict]:
    """Return the record after training has failed on a rank."""
    health = Health(str(folder))
    health.setup(trainer(rank), None, "fit")
    health.on_exception(trainer(rank), None, error)
    health.teardown(trainer(rank), None, "fit")
    return read(folder)


def caused_by(number: int) -> RuntimeError:
    """Return an error that a library raised from one of the system."""
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__cause__ = OSError(number, "no")
    return error


def test_what_torch_makes_of_a_full_disk_in_another_process_is_one(tmp_path):
    class CheckpointError(BaseException):
        """As torch's own, which is no Exception and has the errors of ranks."""

    error = CheckpointError()
    error.failures = {0: (RuntimeError("[enforce fail] . unexpected pos 704 vs 598"), None)}
    assert [line["kind"] for line in failed(tmp_path, error)] == ["disk_full"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_finds_no_room_is_a_full_disk_whatever_a_library_makes_of_it(tmp_path, number):
    (line,) = failed(tmp_path, caused_by(number))
    assert (line["kind"], line["step"], line["ranks"]) == ("disk_full", 12, [0])
    assert "resumes from the last complete checkpoint" in line["remedy"]


def test_a_full_disk_is_recorded_once_also_if_several_ranks_meet_it(tmp_path):
    assert [line["ranks"] for line in failed(tmp_path, caused_by(errno.ENOSPC), rank=1)] == [[1]]
    assert [line["ranks"] for line in failed(tmp_path, caused_by(errno.ENOSPC), rank=2)] == [[1]]
    assert failed(tmp_path / "..", RuntimeError("a closed connection"), rank=1) == []


def test_a_folder_that_is_gone_is_lost_and_the_end_of_training_is_not_disturbed(tmp_path):
    gone = tmp_path / "gone"
    assert failed(gone, FileNotFoundError(errno.ENOENT, "no")) == []
    assert of_error(FileNotFoundError(errno.ENOENT, "no"), gone, 12, 0).kind == "folder_lost"
    assert of_error(OSError(errno.ESTALE, "stale"), tmp_path, 12, 0).kind == "folder_lost"
    assert of_error(FileNotFoundError(errno.ENOENT, "no"), tmp_path, 12, 0).kind == "failed"


def test_a_broken_loss_has_its_documents_and_ctrl_c_is_no_finding(tmp_path):
    documents = [{"sample": 7, "source": "web", "document": 3}]
    error = LossBrokeError("step 12: the loss is nan", again=True, documents=documents)
    (line,) = failed(tmp_path, error)
    assert (line["kind"], line["documents"]) == ("not_finite", documents)
    (tmp_path / "health.jsonl").unlink()
    assert failed(tmp_path, KeyboardInterrupt()) == []


def test_a_rank_that_is_left_points_to_the_one_that_ended_first(tmp_path):
    gloo = "[pair.cc:553] Connection closed by peer [127.0.0.1]:62671. Check the logs"
    for said in (gloo, "[pair.cc:547] Read error [::1]:5: Connection reset by peer"):
        finding = of_error(RuntimeError(said), tmp_path, 18, 0)
        assert (finding.kind, finding.step) == ("failed", 18)
        assert finding.said == "rank 0 lost the connection to another rank, which ended first"


def test_a_rank_that_hangs_says_so_before_its_guard_ends_it():
    said = []
    guard = SimpleNamespace(first_seconds=60, seconds=0.4)
    clock = HangClock(guard, lambda step, seconds: said.append((step, seconds)))
    clock.step(3)
    time.sleep(1.0)
    assert said == [(3, 0.2)]
    clock.step(4)
    clock.stop()
    time.sleep(0.5)
    assert len(said) == 1


def test_the_line_of_a_finding_has_the_time_of_the_clock(tmp_path):
    finding = of_error(RuntimeError("boom"), tmp_path, 1, 0)
    assert finding.kind == "failed"
    assert abs(begins(finding)["time"] - time.time()) < 5


def alerting(folder: Path) -> tuple[Health, Path]:
    """Return a callback that is set up and writes its alerts into a file."""
    folder.mkdir(exist_ok=True)
    out = folder.with_name("alerts")
    health = Health(str(folder), alert=f"sh -c 'cat >> {out}'")
    health.setup(trainer(), None, "fit")
    return health, out


def alerts_in(out: Path, number: int) -> list[dict]:
    """Return the alerts in a file, once it has some number of them."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        lines = out.read_text().splitlines() if out.exists() else []
        if len(lines) >= number:
            return [json.loads(line) for line in lines]
        time.sleep(0.02)
    raise AssertionError(f"{lines} after 30 s")


def test_a_failed_save_and_a_lost_tracker_are_alerted_once(tmp_path, monkeypatch):
    stage = tmp_path / "stage"
    stage.mkdir()
    append(stage, [begins(of_error(RuntimeError("of an earlier process"), stage, 1, 0))])
    health, out = alerting(stage)
    health.on_train_start(trainer(), None)
    finding = failed_saves.failure(stage / "step=4", "OSError: no", full=False, again="")
    failed_saves.tell(stage, 4, finding)
    health.on_train_batch_end(trainer())
    assert [line["kind"] for line in alerts_in(out, 1)] == ["failed_save"]

    def opening(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(trackers, "open_logger", opening)
    lost = Trackers(["mlflow"], str(stage))
    lost.on_train_start(trainer(), None)
    lost.teardown(trainer(), None, "fit")
    health.on_exception(trainer(), None, RuntimeError("boom"))
    health.teardown(trainer(), None, "fit")
    alerts = alerts_in(out, 3)
    kinds = sorted(line["kind"] for line in alerts)
    assert kinds == ["failed", "failed_save", "tracker_down"]
    assert all(line["stage"] == str(stage) for line in alerts)


def test_what_another_rank_has_recorded_is_alerted_by_that_rank_alone(tmp_path):
    stage = tmp_path / "stage"
    health, out = alerting(stage)
    other = Health(str(stage), alert=f"sh -c 'cat >> {out}'")
    other.setup(trainer(1), None, "fit")
    other.on_exception(trainer(1), None, caused_by(errno.ENOSPC))
    other.teardown(trainer(1), None, "fit")
    health.on_exception(trainer(), None, RuntimeError("a closed connection"))
    health.teardown(trainer(), None, "fit")
    assert [line["kind"] for line in alerts_in(out, 2)] == ["disk_full", "failed"]


def test_a_finding_of_an_earlier_process_ends_at_a_resume_and_begins_again_if_it_persists(tmp_path):
    before = [Finding(kind="straggler", step=3, said="rank 3 is slow", ranks=(3,))]
    before += [Finding(kind="tracker_down", step=4, said="mlflow is lost")]
    append(tmp_path, map(begins, before))
    health = Health(str(tmp_path))
    health.setup(trainer(), None, "fit")
    append(tmp_path, [begins(Finding(kind="tracker_down", step=13, said="mlflow is lost"))])
    health.on_train_start(trainer(), None)
    record = read(tmp_path)
    assert [(line["state"], line["kind"], line["step"]) for line in record[3:]] == [
        ("ends", "straggler", 12)
    ]
    assert [finding.kind for finding in recorded(record)[0]] == ["tracker_down"]
    slow = [{"ranks": [3], "seconds": 2.0, "times_the_others": 2.0}]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"step": step, "loss": 2.0, "seconds": 2.0, "slow_ranks": slow}) + "\n"
            for step in range(13, 33)
        )
    health.on_train_batch_end(trainer())
    assert [finding.kind for finding in recorded(read(tmp_path))[0]] == [
        "tracker_down", "straggler",
    ]  # fmt: skip
    health.teardown(trainer(), None, "fit")
