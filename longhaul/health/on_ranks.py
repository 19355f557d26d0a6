# SPDX-License-Identifier: Apache-2.0
"""Health checks on the ranks of a stage: findings to `health.jsonl`, the log and the user's alert.

Rank 0 reads the line that the step log has just written, so this callback comes after it. It also
records why training fails on it; a full disk is recorded by the first rank that meets it. What
other parts of the training record, such as a failed save or a lost tracker, rank 0 passes to the
alert.
"""

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from custom_modules.callbacks.hang_guard import HangGuard, early
from custom_modules.callbacks.loss_guard import LossBrokeError
from data.files.whole import chain
from longhaul.health.alert import Alerts
from longhaul.health.monitor import MetricsTail, Monitor
from longhaul.health.thresholds import CHECK_SECONDS, FREE_BYTES
from recipes.spec.finding import Finding, RecordTail, append, begins, ends, read, recorded
from recipes.spec.passwords import without_passwords

FULL = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file would be larger than its file system or `ulimit -f` admits",
}
"""Errors of a write that finds no room."""
OF_TORCH = "unexpected pos"
"""What torch says of a file that could not be written whole; its processes lose the cause."""
CLOSED = ("Connection closed by peer", "onnection reset by peer")
"""Messages of gloo on the remaining ranks after one has ended."""
LOST = {errno.ENOENT, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ENODEV, errno.EHOSTDOWN}
"""Errors of a folder that is not there any more."""


STAGGERED, MOST_STAGGERED = 0.05, 3.0
"""Seconds by which a rank waits longer than the one before it, and at most."""


class Health(Callback):
    """Check each step, record what begins and ends, and call the alert command."""

    def __init__(self, folder: str, alert: str = "") -> None:
        """Take the stage's folder and the user's alert command."""
        self.folder = Path(folder)
        self.tail = MetricsTail(self.folder / "metrics.jsonl")
        self.monitor = Monitor()
        self.alerts = Alerts(alert, _warn)
        self._record_tail: RecordTail | None = None
        self._own: set[tuple[float, str]] = set()
        """Time and kind of what this callback has recorded."""
        self._earlier: list[Finding] = []
        """Findings of earlier processes that have not ended."""
        self._checked = -CHECK_SECONDS
        self._working = True
        self._clock: HangClock | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the clock, whose thread has locks: NeMo copies a callback before it is set up."""
        if trainer.is_global_zero:
            self._record_tail = RecordTail(self.folder)
            self._earlier = recorded(read(self.folder))[0]
        guards = [one for one in trainer.callbacks if isinstance(one, HangGuard)]
        if trainer.is_global_zero and guards:
            self._clock = HangClock(guards[0], self._hangs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the steps of earlier processes, and end their findings.

        Times and memory are compared in this process alone. A fault that persists begins again.
        """
        if not trainer.is_global_zero:
            return
        self.monitor = Monitor(trainer.global_step)
        self.tail.poll()
        begun = {one.key for one in recorded(self._pass_on())[0]}  # such as a lost tracker
        over = [finding for finding in self._earlier if finding.key not in begun]
        try:
            append(self.folder, [ends(finding, trainer.global_step) for finding in over])
        except OSError as error:
            _warn(f"health: {self.folder} cannot be written: {error}")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Check the newest steps and alert to what others recorded, at most once a second."""
        if self._clock is not None:
            self._clock.step(trainer.global_step)
        if not trainer.is_global_zero:
            return
        now, last = time.monotonic(), trainer.global_step >= trainer.max_steps
        due = last or now - self._checked >= CHECK_SECONDS
        if due:
            self._checked = now
            self._pass_on()
        if self._working:
            self._check(trainer.global_step, due=due)

    def _check(self, step: int, *, due: bool) -> None:
        """Read the newest steps and, if it is due, check them; an error ends the checks."""
        try:
            self.tail.poll()
            if due:
                begun, ended = self.monitor.check(list(self.tail.lines))
                self._record(begun)
                append(self.folder, [ends(finding, step) for finding in ended])
        except Exception as error:
            self._working = False
            _warn(f"health is not checked any more: {type(error).__name__}: {error}")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Record why training fails on this rank."""
        self._stop_clock()
        self._pass_on()
        finding = self.reason(trainer, exception)
        if finding is None:
            return
        if trainer.is_global_zero or self._is_first(finding, trainer.global_rank):
            self._record([finding])
        self.alerts.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say which alerts have failed."""
        self._stop_clock()
        self._pass_on()
        self.alerts.close()

    def _is_first(self, finding: Finding, rank: int) -> bool:
        """Return whether another rank than 0 is to record a full disk, which no other has."""
        if finding.kind != "disk_full" or _has_no_room(self.folder):  # a save fails on rank 0 too
            return False
        time.sleep(min(MOST_STAGGERED, rank * STAGGERED))  # all ranks of a save fail at once
        return not any(
            line["kind"] == finding.kind and line.get("step") == finding.step
            for line in read(self.folder)
        )

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    def _hangs(self, step: int, seconds: float) -> None:
        """Record that no step has ended for too long, shortly before the guard ends the rank."""
        self._record(
            [
                Finding(
                    kind="hang", step=step,
                    said=f"no step has ended for {seconds:,.0f} s; the guard is about to end the "
                    "ranks, and writes their stacks",
                    cause="a rank waits in a collective for one that is lost, or for a file system",
                    remedy="`longhaul doctor hang --run RUN` says which rank waits for what",
                )
            ]
        )  # fmt: skip

    def _pass_on(self) -> list[dict[str, Any]]:
        """Alert to what other parts of the training have recorded since the last call; return it.

        A line that names ranks and is not rank 0's own is of another rank, which alerts itself.
        """
        self.alerts.poll()
        new = []
        for line in [] if self._record_tail is None else self._record_tail.poll():
            own = (line.get("time"), line["kind"]) in self._own or line.get("ranks")
            if line.get("state") == "begins" and not own:
                new.append(line)
                self.alerts.send({"stage": str(self.folder), **line})
        return new

    def _record(self, found: list[Finding]) -> None:
        """Record findings that begin; a folder that cannot be written still alerts."""
        lines = [begins(finding) for finding in found]
        self._own.update((line["time"], line["kind"]) for line in lines)
        for finding, line in zip(found, lines, strict=True):
            _warn(f"health: {finding.kind} at step {finding.step}: {finding.said}")
            self.alerts.send({"stage": str(self.folder), **line})
        try:
            append(self.folder, lines)
        except OSError as error:
            _warn(f"health: {self.folder} cannot be written: {error}")

    def reason(self, trainer: Trainer, exception: BaseException) -> Finding | None:
        """Return the finding of an error that ends training; None for a person's Ctrl-C."""
        if isinstance(exception, KeyboardInterrupt | SystemExit):
            return None
        step, rank = int(trainer.global_step), int(trainer.global_rank)
        if isinstance(exception, LossBrokeError):
            return Finding(
                kind=exception.kind, step=step, said=str(exception), cause=exception.cause,
                remedy="the run rewinds by itself" if exception.again else
                "look at the documents, and lower the learning rate (optim.config.lr)",
                ranks=exception.ranks, documents=exception.documents,
            )  # fmt: skip
        return of_error(exception, self.folder, step, rank)


class HangClock:
    """A thread that calls a function if no step ends shortly before a guard's limit."""

    def __init__(self, guard: HangGuard, hangs: Callable[[int, float], None]) -> None:
        """Start with the limit of the first step."""
        self._guard, self._hangs = guard, hangs
        self._at, self._limit = 0, early(guard.first_seconds)
        self._moved, self._over = threading.Event(), False
        threading.Thread(target=self._watch, daemon=True, name="hang clock").start()

    def step(self, number: int) -> None:
        """Start again after a step."""
        self._at, self._limit = number, early(self._guard.seconds)
        self._moved.set()

    def stop(self) -> None:
        """End the thread."""
        self._over = True
        self._moved.set()

    def _watch(self) -> None:
        while not self._over:
            if self._moved.wait(self._limit):
                self._moved.clear()
            else:
                self._hangs(self._at, self._limit)
                self._moved.wait()


def _warn(text: str) -> None:
    """Log a warning; Python's own warnings are turned off on the ranks."""
    rank_zero_info(f"warning: {text}")


def of_error(error: BaseException, folder: Path, step: int, rank: int) -> Finding:
    """Return the finding of an error by what caused it: a full disk, a lost folder, or neither."""
    links = list(chain(error))
    numbers = {link.errno for link in links if isinstance(link, OSError)}
    of_torch = [link for link in links if OF_TORCH in str(link)]
    if of_torch or _has_no_room(folder):
        numbers.add(errno.ENOSPC)
    first = (of_torch or [link for link in links if isinstance(link, OSError)] or [error])[-1]
    for number, said in FULL.items():
        if number in numbers:
            return Finding(
                kind="disk_full", step=step, ranks=(rank,),
                said=f"rank {rank} could not write: {said} ({_words(first)})",
                cause="checkpoints and logs of this or of other runs fill the file system",
                remedy="make room and start the same command again: it resumes from the last "
                "complete checkpoint",
            )  # fmt: skip
    if not folder.is_dir() or numbers & (LOST - {errno.ENOENT}):
        return Finding(
            kind="folder_lost", step=step, ranks=(rank,),
            said=f"rank {rank} has lost the run folder {folder}: {_words(error)}",
            cause="the shared file system was unmounted or is down, or the folder was moved",
            remedy="mount it again and start the same command: it resumes from the last complete "
            "checkpoint",
        )  # fmt: skip
    by_gloo = [str(link) for link in links if not isinstance(link, OSError)]
    if any(words in link for link in by_gloo for words in CLOSED):
        return Finding(
            kind="failed", step=step, ranks=(rank,),
            said=f"rank {rank} lost the connection to another rank, which ended first",
            cause="the other rank was killed, for example where memory ran out, or failed "
            f"({_words(error)})",
            remedy="see the output of the other ranks; of a training on this machine, `longhaul "
            "doctor run RUN` says how the rank ended",
        )  # fmt: skip
    return Finding(
        kind="failed", step=step, ranks=(rank,),
        said=f"training ended on rank {rank}: {_words(error)}",
        remedy="the rank's output has the whole error",
    )  # fmt: skip


def _has_no_room(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < FREE_BYTES
    except OSError:
        return False


def _words(error: BaseException) -> str:
    words = without_passwords(" ".join(str(error).split()))
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__
