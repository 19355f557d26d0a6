# SPDX-License-Identifier: Apache-2.0
"""Send the metrics of each step to trackers, from threads that training never waits for.

A tracker that cannot be reached, or has no key, is left out from then on: the log says so once, and
`health.jsonl` has a line of the kind `tracker_down`. Metrics of a resumed stage go on in the same
run of the tracker, whose id is in `trackers.json` of the stage's folder.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from custom_modules.metrics.names import tracked
from data.files.json_object import json_object
from data.files.whole import write_text
from recipes.nemo2.tracker_loggers import TrackedLogger, open_logger
from recipes.spec.finding import Finding, append, begins
from recipes.spec.passwords import without_passwords

IDS = "trackers.json"
MOST_WAITING = 1000
"""Steps that a tracker may be behind."""
SECONDS_TO_FINISH = 20.0
"""That the end of a training waits for its trackers: schedulers grant little more."""
REMEDIES = {
    "wandb": "set WANDB_API_KEY or run `wandb login`; WANDB_MODE=offline needs neither",
    "mlflow": "check MLFLOW_TRACKING_URI; without it runs are written into the stage's folder",
    "trackio": "check TRACKIO_SPACE_ID; without it runs are written to TRACKIO_DIR on this machine",
    "otel": "check OTEL_EXPORTER_OTLP_ENDPOINT and the collector there",
    "tensorboard": "check the room and rights of the stage's folder",
}


class Trackers(Callback):
    """Send each line of the step log to trackers; rank 0 does."""

    def __init__(self, names: Sequence[str], folder: str) -> None:
        """Take the trackers' names and the stage's folder."""
        self.names, self.folder = tuple(names), Path(folder)
        self.senders: list[_Sender] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to open the trackers."""
        if not trainer.is_global_zero:
            return
        ids, config = json_object(self.folder / IDS), json_object(self.folder / "stage.json")
        config = {"stage": self.folder.name, **config}
        # A stage of run `runs/tiny` is in `runs/tiny/stages/NAME`.
        first = int(trainer.global_step) + 1
        run_name = f"{self.folder.parent.parent.name}/{self.folder.name}"
        for name in self.names:

            def opening(name: str = name) -> TrackedLogger:
                return open_logger(
                    name, trainer, self.folder,
                    run_id=ids.get(name, ""), run_name=run_name, config=config,
                )  # fmt: skip

            self.senders.append(_Sender(name, opening, self._opened, self._down, first))
        self._ids, self._lock = dict(ids), threading.Lock()
        for sender in self.senders:
            sender.start()

    def on_step_line(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """Pass a line on; called by the step log on rank 0."""
        metrics = tracked(line) if self.senders else {}
        for sender in self.senders:
            sender.send(metrics, int(line["step"]))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the validation loss on."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is None or not self.senders:
            return
        for sender in self.senders:
            sender.send({"validation_metrics/val_loss": float(loss)}, int(trainer.global_step))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the trackers, and give up those that take too long."""
        end = time.perf_counter() + SECONDS_TO_FINISH
        for sender in self.senders:
            sender.finish()
        for sender in self.senders:
            if not sender.ended(max(0.0, end - time.perf_counter())):
                _warn(f"{sender.name} has not taken all metrics in time")
        self.senders = []

    def _opened(self, name: str, run_id: str) -> None:
        """Note the id of a tracker's run, for the next attempt."""
        with self._lock:
            if run_id and self._ids.get(name) != run_id:
                self._ids[name] = run_id
                write_text(self.folder / IDS, json.dumps(self._ids) + "\n")

    def _down(self, name: str, step: int, error: BaseException) -> None:
        """Say once that a tracker is left out from a step on."""
        words = without_passwords(" ".join(str(error).split()))  # before it is cut
        cause = f"{type(error).__name__}: {words[:300]}"
        said = f"{name} does not take metrics from step {step} on; training continues"
        _warn(f"{said}. {cause}. {REMEDIES[name]}")
        finding = Finding(
            kind="tracker_down", step=step, said=said, cause=cause, remedy=REMEDIES[name]
        )
        with suppress(OSError), self._lock:  # a full disk ends no training either
            append(self.folder, [begins(finding)])


def _warn(text: str) -> None:
    """Log a warning; Python's own warnings are turned off on the ranks."""
    rank_zero_info(f"warning: {text}")


class _Sender:
    """A thread that opens a tracker, logs what is sent to it, and closes it."""

    def __init__(
        self,
        name: str,
        opening: Callable[[], TrackedLogger],
        opened: Callable[[str, str], None],
        down: Callable[[str, int, BaseException], None],
        first: int,
    ) -> None:
        self.name, self._step = name, first
        self._opening, self._opened, self._down = opening, opened, down
        self._waiting: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue()
        self._lost = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, metrics: dict[str, float], step: int) -> None:
        """Put the numbers of a step in the queue; a tracker too far behind is left out."""
        if self._lost:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self._lose(step, TimeoutError(f"it is {MOST_WAITING} steps behind"))
            return
        self._waiting.put((metrics, step))

    def finish(self) -> None:
        self._waiting.put(None)

    def ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self._lost or not self._thread.is_alive()

    def _lose(self, step: int, error: BaseException) -> None:
        if not self._lost:
            self._lost = True
            self._down(self.name, step, error)

    def _run(self) -> None:
        try:
            tracker = self._opening()
            self._opened(self.name, tracker.run_id)
            while (item := self._waiting.get()) is not None:
                metrics, self._step = item
                tracker.log(metrics, self._step)
            tracker.close()
        except Exception as error:  # whatever a tracker raises, training continues
            self._lose(self._step, error)
