# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition: a test that waits for a moment fails on a busy machine."""

import time
from collections.abc import Callable
from typing import Any


def until(
    condition: Callable[[], Any], timeout_seconds: float = 240, every_seconds: float = 0.05
) -> Any:
    """Wait until a condition holds and return what it returned; raise TimeoutError otherwise."""
    end = time.monotonic() + timeout_seconds
    while not (result := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"the condition does not hold after {timeout_seconds} s")
        time.sleep(every_seconds)
    return result
