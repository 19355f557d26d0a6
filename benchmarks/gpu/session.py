# SPDX-License-Identifier: Apache-2.0
"""Cases in processes of their own, within the seconds given; a later session resumes.

Neighbouring cases share a process, since its imports take as long as a case; one that may run out
of memory has its own. A process that dies, or does not heed the deadline of its case, costs that
case's result and no other.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case
from benchmarks.gpu.results import Result, Results
from benchmarks.harness.processes import children_of, kill
from recipes.planner.timeouts import ALLOCATOR

PAUSE = 0.2
GRACE = 5.0
"""Seconds after its deadline that a case has to end by itself."""
START_SECONDS = {"cuda": 20.0, "cpu": 5.0}
"""To import Megatron-Core and reach the device."""
PAGE_SECONDS = 3.0
"""Left at the end, to write the page."""
LAST_LINES = 3
VARIABLES = {
    # Cluster files set it for GPUs before Blackwell; on one GPU 1 and 8 took the same time.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR,  # as every training has it
    # A pool of compilers is killed with a case that is overdue, and later cases would wait for it.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
"""Variables that CUDA and torch read once; a value that is set already stays."""


def facts_of_machine(device: str, rental: Path) -> dict[str, Any]:
    """Return the machine's name, why nothing should be measured here, and the rental.

    All are asked for in a process of its own, and the rental, with its canary, is written to its
    file where none is. Raises RuntimeError with the end of what the process said.
    """
    words = ["machine", "--device", device, "--rental", str(rental)]
    done = subprocess.run(
        _command(*words), capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        last = " | ".join(done.stderr.splitlines()[-LAST_LINES:])
        raise RuntimeError(f"the device could not be asked for its name: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def shortest(cases: Sequence[Case], device: str, peak: float) -> float:
    """Return the seconds that a session needs for its first result."""
    least = min(case.estimate(device, peak) for case in cases)
    return START_SECONDS[device] + least + PAGE_SECONDS


def run(
    cases: Sequence[Case], results: Results, device: str, rental: Path, *, until: float, peak: float
) -> None:
    """Run the cases in order, as far as the time until a moment of `time.time` allows.

    Raises RuntimeError, with the end of its log, if a process fails before its first case.
    """
    results.clear_mark()
    until -= PAGE_SECONDS
    for alone, some in groupby(cases, key=lambda case: case.alone):
        for group in [[case] for case in some] if alone else [list(some)]:
            left = group
            while left and time.time() + shortest(left, device, peak) - PAGE_SECONDS < until:
                left = _in_a_process(left, results, device, rental, until, peak)


def _command(*words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *words]


def _environment() -> dict[str, str]:
    return VARIABLES | dict(os.environ)


def _in_a_process(
    group: list[Case], results: Results, device: str, rental: Path, until: float, peak: float
) -> list[Case]:
    """Run a worker to its end; return the cases that are left for another.

    Those after the one that ended it; or, after one that ran out of memory, those not measured.
    """
    before = set(results.read())
    command = _command(
        "worker", "--device", device, "--out", str(results.folder), "--rental", str(rental),
        "--until", str(until), "--peak", str(peak), "--cases", *(case.name for case in group),
    )  # fmt: skip
    log = results.folder / "worker.log"
    with log.open("a") as output:
        worker = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            ended = _watched(worker, results)
        finally:
            if worker.poll() is None:
                _end(worker)
    begun, measured = results.under_way(), set(results.read()) - before
    if begun is None and (worker.returncode == 0 or measured):  # libraries can fail at the exit
        return [case for case in group if case.name not in measured] if measured else []
    last = " | ".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    if begun is None:
        raise RuntimeError(f"the process of the cases ended with {worker.returncode}: {last}")
    number = [case.name for case in group].index(begun["case"])
    reason = ended or f"its process ended with {worker.returncode}: {last}"
    partly = results.read().get(begun["case"])
    results.write(
        Result.of(
            group[number], device, reason=reason, seconds=time.time() - begun["start"],
            rental=json.loads(rental.read_text())["id"],
            figures={} if partly is None or begun["case"] in before else partly.figures,
        )
    )  # fmt: skip
    results.clear_mark()
    return group[number + 1 :]


def _watched(worker: "subprocess.Popen[bytes]", results: Results) -> str:
    """Wait for a worker, and end it in a case that takes too long; return why it was ended."""
    told = set(results.read())
    while worker.poll() is None:
        time.sleep(PAUSE)
        for name in set(results.read()) - told:
            told.add(name)
            print(f"  {name}", flush=True)
        begun = results.under_way()
        if begun is not None and time.time() - begun["start"] > begun["limit"] + GRACE:
            _end(worker)
            return f"took longer than {begun['limit']:.0f} s and was ended with its process"
    return ""


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Kill a worker and all it has started, in whatever process group that is."""
    kill(children_of(worker.pid))
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
