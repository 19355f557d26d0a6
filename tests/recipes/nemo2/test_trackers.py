# SPDX-License-Identifier: Apache-2.0
"""Trackers get each step's numbers, continue their run after a resume, and never end a training."""

import json
import logging
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.nemo2 import trackers
from recipes.nemo2.trackers import Trackers
from tests.conditions import until

LINE = {"tokens": 100, "mfu": 0.4, "loss_by_position": {"0-4": 2.0, "4+": 1.0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stage = tmp_path / "runs" / "tiny" / "stages" / "tiny_512"
    stage.mkdir(parents=True)
    (stage / "stage.json").write_text('{"name": "tiny_512", "seq_length": 512}')
    return stage


def train(folder: Path, names: list[str], steps: range) -> None:
    """Run the hooks of a training of some steps."""
    trainer = SimpleNamespace(is_global_zero=True, callback_metrics={}, global_step=steps.start - 1)
    callback = Trackers(names, str(folder))
    callback.on_train_start(trainer, None)
    for step in steps:
        callback.on_step_line(trainer, {"step": step, "loss": 1 / step, **LINE})
    callback.teardown(trainer, None, "fit")


def ids(folder: Path) -> dict[str, str]:
    return json.loads((folder / "trackers.json").read_text())


def findings(folder: Path) -> list[dict]:
    path = folder / "health.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def warned(caplog, text: str) -> str:
    """Return the one warning with this text in the log: Python's own are turned off on ranks."""
    [message] = [one.getMessage() for one in caplog.records if text in one.getMessage()]
    assert message.startswith("warning: ")
    return message


@pytest.fixture(autouse=True)
def logged(caplog):
    """Have what rank 0 logs."""
    caplog.set_level(logging.INFO, "lightning.pytorch")


@pytest.fixture(autouse=True)
def python_s_warnings_are_off():
    """Ignore Python's warnings, as the ranks of a training do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def time_to_finish(monkeypatch):
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 120.0)  # imports on a busy machine


def test_wandb_offline_continues_its_run_after_a_resume(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in (range(1, 3), range(3, 5)):
        train(folder, ["wandb"], steps)
        run_id = ids(folder)["wandb"]
    assert findings(folder) == []
    runs = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [run.name for run in runs] == [f"run-{run_id}.wandb"] * 2
    name = b"loss_metrics/global_avg_loss"
    until(lambda: all(name in run.read_bytes() for run in runs))  # written by a process of wandb's


def test_a_tracker_without_a_key_is_left_out_and_said_once(folder, monkeypatch, caplog):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(folder / "none"))
    train(folder, ["wandb"], range(5, 9))
    warned(caplog, "wandb does not take metrics from step 5 on")
    [finding] = findings(folder)
    assert (finding["kind"], finding["step"]) == ("tracker_down", 5)
    assert "no API key is configured" in finding["cause"]
    assert "WANDB_API_KEY" in finding["remedy"]


def test_tensorboard_has_the_names_of_the_field(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(folder, ["tensorboard"], range(1, 4))
    events = EventAccumulator(str(folder / "tensorboard" / "events"))
    events.Reload()
    points = events.Scalars("mfu(%)")
    assert [(point.step, point.value) for point in points] == [(1, 40), (2, 40), (3, 40)]


def test_mlflow_without_a_server_continues_its_run_in_files(folder, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for steps in (range(1, 3), range(3, 5)):
        train(folder, ["mlflow"], steps)
    assert findings(folder) == []
    [metric] = (folder / "mlruns").glob(f"*/{ids(folder)['mlflow']}/metrics/mfu")
    assert [int(line.split()[2]) for line in metric.read_text().splitlines()] == [1, 2, 3, 4]


def test_the_password_of_a_tracker_s_address_is_neither_in_the_log_nor_in_the_record(
    folder, monkeypatch, caplog
):
    def opening(*_: object, **__: object) -> None:
        raise ConnectionError("API request to http://user:pa55word@host:5000/api failed")

    monkeypatch.setattr(trackers, "open_logger", opening)
    train(folder, ["mlflow"], range(1, 3))
    said = warned(caplog, "mlflow does not take metrics")
    [finding] = findings(folder)
    assert "to http://***@host:5000/api failed" in finding["cause"]
    texts = [json.dumps(finding), said]
    assert not any("pa55word" in text for text in texts)


def test_mlflow_s_own_error_has_its_password_masked(folder, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:pa55word@127.0.0.1:9")  # none listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    train(folder, ["mlflow"], range(1, 3))
    said = warned(caplog, "mlflow does not take metrics")
    texts = [json.dumps(findings(folder)), said]
    assert any("***@127.0.0.1:9" in text for text in texts)
    assert not any("pa55word" in text for text in texts)


def test_a_rank_other_than_0_opens_no_tracker(folder):
    callback = Trackers(["tensorboard"], str(folder))
    callback.on_train_start(SimpleNamespace(is_global_zero=False, global_step=0), None)
    callback.on_step_line(None, {"step": 1, **LINE})
    callback.teardown(None, None, "fit")
    assert not (folder / "tensorboard").exists()


def test_a_tracker_that_lags_behind_does_not_hold_training_up(folder, monkeypatch, caplog):
    waits = threading.Event()
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 0.1)
    monkeypatch.setattr(trackers, "open_logger", lambda *_, **__: waits.wait(60))
    train(folder, ["wandb"], range(1, 10))
    warned(caplog, "wandb does not take metrics from step 4 on")
    waits.set()
    assert "3 steps behind" in findings(folder)[0]["cause"]
