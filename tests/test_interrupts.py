# SPDX-License-Identifier: Apache-2.0
"""The suite in the background, where the shell has it ignore Ctrl-C: `nohup make test &`."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.house.rooms import TREE

WAITS = "import time; print('waits', flush=True); time.sleep(60)"


def test_a_process_that_a_test_starts_can_be_interrupted():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WAITS], **pipes) as waiting:
        assert waiting.stdout.readline() == b"waits\n"
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(30) == -signal.SIGINT
        assert b"KeyboardInterrupt" in waiting.stderr.read()


def test_it_can_where_the_suite_itself_ignores_the_signal():
    test = f"{Path(__file__)}::{test_a_process_that_a_test_starts_can_be_interrupted.__name__}"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "1", test],
            cwd=TREE, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
