# SPDX-License-Identifier: Apache-2.0
"""The user's alert command: a finding as JSON on its standard input; light.

The command is split into words as a shell does and started without one, in a session of its own,
by `timeout`, which kills all of it after 30 s. Training neither waits for it nor fails with it, and
commands of findings that begin together run at the same time.
That it failed is a line of the log with its program and exit code alone: its other words, and what
it prints, may have a webhook's address, and trackers such as W&B send the log on.
"""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

SECONDS = 30.0
"""How long a command may run."""
CLOSING_SECONDS = 2.0
"""How long the end of training waits for alerts, to say that they failed."""


def require_alert(command: str, *, here: bool = True) -> None:
    """Raise ValueError for an alert command that cannot be started; empty means none.

    `here` is False for jobs, which run where the program may be in another place.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(
            f"--alert {command!r} cannot be split into words ({error}); quote it as for a shell"
        ) from None
    if command and not words:
        raise ValueError("--alert is empty; expected a command, such as 'sh -c \"cat >> alerts\"'")
    if words and here and shutil.which(words[0]) is None:
        raise ValueError(
            f"--alert starts {words[0]}, which is not an executable file on PATH; a line of shell "
            f"needs `sh -c`: --alert {shlex.quote(shlex.join(['sh', '-c', command]))}"
        )


class Alerts:
    """Calls the command for each finding."""

    def __init__(self, command: str, say: Callable[[str], Any]) -> None:
        """Take the command (empty: none is called), and what tells the user that it failed."""
        self.words, self.say = shlex.split(command), say
        self._running: dict[subprocess.Popen[bytes], float] = {}
        """The alerts that run, and when each began."""

    def send(self, content: Mapping[str, Any]) -> None:
        """Start the command with the content as JSON; return at once."""
        if not self.words:
            return
        words = ["timeout", "-s", "KILL", f"{SECONDS:g}", *self.words]
        try:
            # In memory, as disks may be full; a pipe would hold a part, and the rest would wait.
            with os.fdopen(os.memfd_create("alert"), "w+b") as given:
                given.write(json.dumps(content).encode() + b"\n")
                given.seek(0)
                process = subprocess.Popen(
                    words, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:  # no process, or too many open files
            self._failed(error.strerror)
        else:
            self._running[process] = time.monotonic()

    def poll(self) -> None:
        """Say which have failed."""
        for process, began in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[process]
            if code < 0 and time.monotonic() - began >= SECONDS:
                self._failed(f"it was killed after {SECONDS:g} s")
            elif code:
                self._failed(f"exit code {code}" if code > 0 else f"signal {-code}")

    def close(self) -> None:
        """Say which have failed; one that still runs outlives this process."""
        end = time.monotonic() + CLOSING_SECONDS
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self.poll()

    def _failed(self, why: object) -> None:
        said = f"the alert command ({self.words[0]} ...) failed: {why}"
        self.say(f"{said}; what it printed is not logged")
