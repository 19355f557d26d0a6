# SPDX-License-Identifier: Apache-2.0
"""The user's alert command: a finding as JSON on its standard input; light.

The command is split into words as a shell does and started without one, so no name of a run or of a
document is ever read by a shell; `sh -c '...'` takes a line of shell. It runs in a session of its
own, one at a time, and is killed after a timeout. Training neither waits for it nor fails with it;
that it failed is said once, by its program and exit code alone: its other words, and what it
prints, may have a webhook's address, and trackers such as W&B send the log on.
"""

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from recipes.spec.passwords import without_passwords

SECONDS = 30.0
"""How long a command may run."""
CLOSING_SECONDS = 2.0
"""How long the end of training waits for the last alerts to end, and again for them to start."""
MOST_WAITING = 64
"""Findings that may wait for a command that hangs; further ones are only recorded."""


def words_of(command: str) -> list[str]:
    """Return the words of an alert command; raise ValueError if it cannot be split or is empty."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(
            f"--alert {command!r} cannot be split into words ({error}); quote it as for a shell"
        ) from None
    if not words:
        raise ValueError("--alert is empty; expected a command, such as 'sh -c \"cat >> alerts\"'")
    return words


def require_alert(command: str, *, here: bool = True) -> None:
    """Raise ValueError for an alert command that cannot be started; empty means none.

    `here` is False for jobs, which run where the program may be in another place.
    """
    if not command:
        return
    program = words_of(command)[0]
    if here and shutil.which(program) is None:
        raise ValueError(
            f"--alert starts {program}, which is not an executable file on PATH; a line of shell "
            f"needs `sh -c`: --alert {shlex.quote(shlex.join(['sh', '-c', command]))}"
        )


class Alerts:
    """Calls the command for each finding, on a thread of its own."""

    def __init__(self, command: str, say: Callable[[str], Any], seconds: float = SECONDS) -> None:
        """Take the command (empty: none is called), and what tells the user that it failed."""
        self.words = words_of(command) if command else []
        self.say, self.seconds = say, seconds
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._idle = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = False

    def send(self, content: Mapping[str, Any]) -> None:
        """Have the command called with the content as JSON; return at once."""
        if not self.words:
            return
        self._idle.clear()
        try:
            self._waiting.put_nowait(json.dumps(content).encode() + b"\n")
        except queue.Full:
            self._say_once(f"{MOST_WAITING} alerts wait for it")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="alerts")
            self._thread.start()

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Return once all have ended, or after some seconds, when what still waits is started.

        A command that runs then outlives this process, in its own session.
        """
        if self._thread is None or self._idle.wait(seconds):
            return
        self._closing.set()
        self._idle.wait(seconds)

    def _work(self) -> None:
        while True:
            content = self._waiting.get()
            try:
                self._call(content)
            except Exception as error:
                self._say_once(str(error))
            if self._waiting.empty():
                self._idle.set()

    def _call(self, content: bytes) -> None:
        with _file_of(content) as given:
            process = subprocess.Popen(
                self.words, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + self.seconds
        while process.poll() is None:
            if self._closing.is_set():
                return
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._say_once(f"it did not end within {self.seconds:g} s and was killed")
                return
            time.sleep(0.05)
        if process.returncode:
            self._say_once(f"exit code {process.returncode}; what it printed is not logged")

    def _say_once(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            why = without_passwords(why)
            self.say(f"the alert command ({self.words[0]} ...) failed: {why}; said once")


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[BinaryIO]:
    """Yield an open file of some content: in memory if the system can, as disks may be full.

    A pipe would hold a part of it, and the rest would wait for a command that does not read.
    """
    in_memory = getattr(os, "memfd_create", None)
    with os.fdopen(in_memory("alert"), "w+b") if in_memory else tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file
