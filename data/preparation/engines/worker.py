# SPDX-License-Identifier: Apache-2.0
"""A process that does tasks: it reads their numbers from standard input, a line each.

The answer is a line of JSON on standard output: the receipt, or the error. The process ends when
its input ends, also in the middle of a task: then whoever started it is gone.
"""

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from data.preparation.task import run_task
from data.preparation.work import Work


def main(folder: str) -> None:
    """Do tasks of a work folder until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it reaches all processes
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(numbers,), daemon=True).start()
    work = Work(Path(folder))
    while True:
        answers.write(json.dumps(answer(work, numbers.get())) + "\n")
        answers.flush()


def answer(work: Work, number: int) -> dict[str, Any]:
    """Return the receipt of a task, or its error, as values of JSON."""
    try:
        return {"receipt": run_task(work, number).json()}
    except ValueError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {"os_error": [error.errno, error.strerror or str(error), error.filename]}
    except MemoryError:
        return {"refused": f"part {number} needs more memory than there is; use fewer --workers"}


def _read(numbers: "queue.SimpleQueue[int]") -> None:
    for line in sys.stdin:
        numbers.put(int(line))
    os._exit(0)
