# SPDX-License-Identifier: Apache-2.0
"""Send the metrics of each step to Lightning's loggers, from threads that training never waits for.

In a trainer a logger is part of the step: without a key it ends the training, and while a server
does not answer all ranks wait. Here a thread of rank 0 opens, calls and closes each. One that fails
gets no further metrics: the log says so once, and `health.jsonl` has a line of the kind
`tracker_down`. A resumed stage continues the tracker's run, whose id is in `trackers.json` of the
stage's folder.
"""

import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from custom_modules.metrics.names import tracked
from data.files.json_object import json_object
from data.files.whole import write_text
from recipes.spec.finding import Finding, append, begins
from recipes.spec.passwords import without_passwords

IDS, LOCK = "trackers.json", threading.Lock()
PROJECT = "longhaul"
"""Project or experiment unless the tracker's own variable names one."""
MOST_WAITING = 1000
"""Steps that a tracker may be behind."""
SECONDS_TO_FINISH = 20.0
"""That the end of a training waits for its trackers: schedulers grant little more."""
REMEDIES = {
    "wandb": "set WANDB_API_KEY or run `wandb login`; WANDB_MODE=offline needs neither",
    "mlflow": "check MLFLOW_TRACKING_URI; without it runs are written into the stage's folder",
    "tensorboard": "check the room and rights of the stage's folder",
}


def open_logger(name: str, folder: Path, run_id: str) -> Logger:
    """Return the open logger of a stage; `run_id` is that of an earlier attempt, or empty.

    Raises whatever its tracker raises: no network, no key, no server.
    """
    run_name = f"{folder.parent.parent.name}/{folder.name}"  # of runs/tiny/stages/NAME
    if name == "tensorboard":
        return TensorBoardLogger(save_dir=str(folder), name="tensorboard", version="events")
    logger: WandbLogger | MLFlowLogger
    if name == "wandb":
        import wandb

        offline = os.environ.get("WANDB_MODE", "") in ("offline", "dryrun", "disabled")
        if not offline and not wandb.api.api_key:
            raise RuntimeError("no API key is configured")  # it would ask for one on a terminal
        logger = WandbLogger(
            name=os.environ.get("WANDB_NAME", run_name),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            save_dir=os.environ.get("WANDB_DIR", str(folder)), id=run_id or uuid.uuid4().hex[:8],
        )  # fmt: skip
    else:
        # MLflow retries for minutes by default, and the run would end meanwhile.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        # Without a server runs are files, which MLflow 3 asks to confirm.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        logger = MLFlowLogger(
            experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
            run_name=os.environ.get("MLFLOW_RUN_NAME", run_name),
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
            save_dir=str(folder / "mlruns"), run_id=run_id or None,
        )  # fmt: skip
    if not run_id:
        logger.log_hyperparams({"stage": folder.name, **json_object(folder / "stage.json")})
    return logger


class Trackers(Callback):
    """Send each line of the step log to trackers; rank 0 does."""

    def __init__(self, names: Sequence[str], folder: str) -> None:
        """Take the trackers' names and the stage's folder."""
        self.names, self.folder = tuple(names), Path(folder)
        self.senders: list[_Sender] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to open the trackers."""
        if trainer.is_global_zero:
            first = int(trainer.global_step) + 1
            self.senders = [_Sender(name, self.folder, first) for name in self.names]
        for sender in self.senders:
            sender.start()

    def on_step_line(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """Pass a line on; called by the step log on rank 0."""
        metrics = tracked(line) if self.senders else {}
        for sender in self.senders:
            sender.send((metrics, int(line["step"])))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the validation loss on."""
        loss = trainer.callback_metrics.get("val_loss")
        for sender in self.senders if loss is not None else ():
            metrics = {"validation_metrics/val_loss": float(loss)}
            sender.send((metrics, int(trainer.global_step)))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the trackers, and give up those that take too long."""
        end = time.perf_counter() + SECONDS_TO_FINISH
        for sender in self.senders:
            sender.send(None)
        for sender in self.senders:
            sender.join(max(0.0, end - time.perf_counter()))
            if sender.is_alive() and not sender.lost:
                _warn(f"{sender.tracker} has not taken all metrics in time")
        self.senders = []


class _Sender(threading.Thread):
    """Opens a tracker, logs what is sent to it, and closes it."""

    def __init__(self, tracker: str, folder: Path, step: int) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker, self.folder, self.step, self.lost = tracker, folder, step, False
        self._waiting: queue.Queue[tuple[dict[str, float], int] | None]
        self._waiting = queue.Queue()

    def send(self, item: tuple[dict[str, float], int] | None) -> None:
        """Put the numbers of a step, or the end, in the queue; one too far behind is left out."""
        if item is not None and self._waiting.qsize() >= MOST_WAITING:
            self._lose(item[1], TimeoutError(f"it is {MOST_WAITING} steps behind"))
        if item is None or not self.lost:
            self._waiting.put(item)

    def run(self) -> None:
        try:
            run_id = json_object(self.folder / IDS).get(self.tracker, "")
            logger = open_logger(self.tracker, self.folder, run_id)
            self._note(str(logger.version))
            while (item := self._waiting.get()) is not None:
                metrics, self.step = item
                logger.log_metrics(metrics, self.step)
            logger.finalize("success")
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()
        except Exception as error:  # whatever a tracker raises, training continues
            self._lose(self.step, error)

    def _note(self, run_id: str) -> None:
        """Note the id of the tracker's run, for the next attempt."""
        with LOCK:
            ids = json_object(self.folder / IDS)
            if ids.get(self.tracker) != run_id:
                write_text(self.folder / IDS, json.dumps({**ids, self.tracker: run_id}) + "\n")

    def _lose(self, step: int, error: BaseException) -> None:
        """Say once that a tracker is left out from a step on."""
        if self.lost:
            return
        self.lost = True
        words = without_passwords(" ".join(str(error).split()))  # before it is cut
        cause, remedy = f"{type(error).__name__}: {words[:300]}", REMEDIES[self.tracker]
        said = f"{self.tracker} does not take metrics from step {step} on; training continues"
        _warn(f"{said}. {cause}. {remedy}")
        finding = Finding(kind="tracker_down", step=step, said=said, cause=cause, remedy=remedy)
        with suppress(OSError), LOCK:  # a full disk ends no training either
            append(self.folder, [begins(finding)])


def _warn(text: str) -> None:
    """Log a warning; Python's own warnings are turned off on the ranks."""
    rank_zero_info(f"warning: {text}")
