# SPDX-License-Identifier: Apache-2.0
"""A pool of processes on this machine.

Each is a Python of its own that imports neither torch nor transformers, and gets one task at a
time. A task whose process is killed is given to a new one.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from data.formats.records import SourceError
from data.preparation.engines.answers import described, receipt_of
from data.preparation.engines.in_process import Done
from data.preparation.work import Work

MOST_KILLED = 3
"""Processes that one task may lose."""
TREE = Path(__file__).resolve().parents[3]
_PROGRAM = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # a user's file may be named as a module
from data.preparation.engines.worker import main
main(sys.argv[1])
"""


def cores() -> int:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_pool(work: Work, numbers: Sequence[int], done: Done, workers: int) -> None:
    """Do tasks in `workers` processes, in the order given; `done` receives each receipt.

    Raises SourceError or OSError as a task does, after the processes have ended.
    """
    with _Pool(work, min(workers, len(numbers))) as pool:
        pool.run(numbers, done)


class _Worker:
    def __init__(self, work: Work) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(work.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        self.number: int | None = None

    @property
    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, number: int) -> None:
        self.number = number
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class _Pool:
    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.selector = selectors.DefaultSelector()
        self.workers: list[_Worker] = []
        self.count = workers
        self.killed = Counter[int]()

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()
        self.selector.close()

    def run(self, numbers: Sequence[int], done: Done) -> None:
        waiting = deque(numbers)
        for _ in range(self.count):
            self._start(waiting)
        while self.workers:
            for key, _ in self.selector.select():
                worker: _Worker = key.data
                line = worker.output.readline()
                number = worker.number
                assert number is not None
                if not line.endswith("\n"):
                    self._ended(worker, number)
                    waiting.appendleft(number)
                    self._start(waiting)
                    continue
                done(number, receipt_of(json.loads(line), self.work))
                if waiting:
                    self._give(worker, waiting)
                else:
                    self._stop(worker)

    def _start(self, waiting: "deque[int]") -> None:
        if waiting:
            worker = _Worker(self.work)
            self.workers.append(worker)
            self.selector.register(worker.output, selectors.EVENT_READ, worker)
            self._give(worker, waiting)

    def _give(self, worker: _Worker, waiting: "deque[int]") -> None:
        worker.number = waiting.popleft()
        with suppress(BrokenPipeError):  # it was killed: its output ends too
            worker.give(worker.number)

    def _stop(self, worker: _Worker) -> None:
        self.selector.unregister(worker.output)
        self.workers.remove(worker)
        worker.end()

    def _ended(self, worker: _Worker, number: int) -> None:
        self._stop(worker)
        self.killed[number] += 1
        code = worker.process.returncode
        if self.killed[number] < MOST_KILLED and code < 0:
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if -code == signal.SIGKILL:
            how += ", which the kernel sends when memory runs out (use fewer --workers)"
        raise SourceError(f"the process that prepared {described(self.work, number)} {how}")


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(TREE), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
