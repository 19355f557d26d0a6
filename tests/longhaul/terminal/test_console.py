# SPDX-License-Identifier: Apache-2.0
"""An interrupt that a library suppresses while it is imported still ends the command."""

import os
import signal
import threading
from contextlib import suppress

import pytest

from longhaul.terminal.console import interruptible


@pytest.fixture(autouse=True)
def of_python():
    """Set Python's own handler of SIGINT, which a test run started by nohup ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _suppressing(seen: list[str]) -> None:
    with interruptible():
        with suppress(BaseException):
            _interrupt()
        seen.append("after")


def _broken_by_it() -> None:
    with interruptible():
        with suppress(KeyboardInterrupt):
            _interrupt()
        raise ImportError("partially initialized module")


def test_a_suppressed_interrupt_is_raised_at_the_end():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        _suppressing(seen)
    assert seen == ["after"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_that_an_interrupt_has_caused_is_the_interrupt():
    with pytest.raises(KeyboardInterrupt):
        _broken_by_it()


def test_other_errors_pass_and_an_ignored_interrupt_stays_ignored():
    with pytest.raises(ImportError), interruptible():
        raise ImportError("absent")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            _interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_sets_no_handler():
    found = []

    def load() -> None:
        with interruptible():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
