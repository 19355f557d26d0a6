# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of files and of parts of them, computed in threads; standard library only.

hashlib releases the interpreter's lock while it computes, so threads hash in parallel with other
code.
"""

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PIECE = 2**20
"""Bytes read at a time."""
MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `stop` of a file; to its end if `stop` is None."""

    path: Path
    start: int = 0
    stop: int | None = None


class Hashing:
    """SHA-256 of several parts, computed in threads that start on construction.

    As a context manager, it stops its threads on exit.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Start the threads: at most one a part, one a processor, and `MOST_THREADS`."""
        self._stopped = threading.Event()
        threads = max(1, min(len(parts), os.cpu_count() or 1, MOST_THREADS))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sha256")
        self._running = [self._pool.submit(_digest, part, self._stopped) for part in parts]

    def results(self) -> list[str | OSError]:
        """Return the hexadecimal sum of each part, in order, or the error from reading it."""
        return [running.result() for running in self._running]

    def __enter__(self) -> "Hashing":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)


def sha256_of(paths: Sequence[Path]) -> list[str]:
    """Return the sum of each file; raises OSError for one that cannot be read."""
    with Hashing([Part(path) for path in paths]) as hashing:
        sums = []
        for result in hashing.results():
            if isinstance(result, OSError):
                raise result
            sums.append(result)
        return sums


def _digest(part: Part, stopped: threading.Event) -> str | OSError:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
    try:
        with part.path.open("rb", buffering=0) as file:
            file.seek(part.start)
            left = None if part.stop is None else part.stop - part.start
            while (left is None or left) and not stopped.is_set():
                read = file.readinto(buffer if left is None else buffer[: min(PIECE, left)])
                if not read:
                    break
                digest.update(buffer[:read])
                left = None if left is None else left - read
    except OSError as error:
        return error
    return digest.hexdigest()
