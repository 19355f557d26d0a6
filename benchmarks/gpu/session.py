# SPDX-License-Identifier: Apache-2.0
"""Cases in processes of their own, within the minutes given; a later session goes on.

Variables of the environment that CUDA reads once decide the processes: neighbouring cases with the
same ones share a process. One that dies, or takes far too long, costs its own result and no other.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby

from benchmarks.gpu.cases import Case
from benchmarks.gpu.results import Result, Results
from benchmarks.gpu.sizes import Device

PAUSE = 0.2
PATIENCE, AT_LEAST = 4.0, 300.0
"""A case that takes longer than this multiple of its estimate, and these seconds, is ended."""
START_SECONDS = 20.0
"""To import Megatron-Core and reach the device."""
LAST_LINES = 3


def name_of_machine() -> str:
    """Return the name of this machine and its GPU, asked for in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "machine"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def require_same_machine(found: dict[str, Result], machine: str, device: Device) -> None:
    """Raise ValueError where some results are of another machine, or of another device of it."""
    if any(one.device != device for one in found.values()):
        raise ValueError(
            f"the folder has results of another device than {device}; take another --out"
        )
    others = {one.facts["machine"] for one in found.values() if one.facts} - {machine}
    if others:
        raise ValueError(
            f"the folder has results of another machine ({', '.join(sorted(others))}); this one "
            f"is {machine}: take another --out"
        )


def run(
    cases: Sequence[Case], results: Results, device: Device, *, minutes: float, peak: float
) -> None:
    """Run the cases that have no file yet, in order, as far as the minutes allow.

    Raises RuntimeError, with the end of its log, if a process fails before its first case.
    """
    until = time.time() + 60 * minutes
    results.clear_marks()
    there = results.names()
    left = [case for case in cases if case.name not in there]
    for _, some in groupby(left, key=lambda case: case.connections):
        group = list(some)
        while group and time.time() + START_SECONDS + _least(group, peak) < until:
            group = _in_a_process(group, results, device, until, peak)


def _least(group: Sequence[Case], peak: float) -> float:
    return min(case.seconds(peak) for case in group)


def _in_a_process(
    group: list[Case], results: Results, device: Device, until: float, peak: float
) -> list[Case]:
    """Run a worker to its end; return the cases that are left for another.

    Those after the one that ended it; or, after one that ran out of memory, those not measured.
    """
    before = results.names()
    command = [
        sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "worker", "--device", device,
        "--out", str(results.folder), "--until", str(until), "--peak", str(peak),
        "--cases", *(case.name for case in group),
    ]  # fmt: skip
    log = results.folder / "worker.log"
    with log.open("a") as output:
        worker = subprocess.Popen(
            command, env=os.environ | group[0].environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            ended = _watched(worker, group, results, peak)
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    begun = results.under_way()
    if begun is None and worker.returncode == 0:
        measured = results.names() - before
        return [case for case in group if case.name not in measured] if measured else []
    last = " | ".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    if begun is None:
        raise RuntimeError(f"the process of the cases ended with {worker.returncode}: {last}")
    number = [case.name for case in group].index(begun[0])
    reason = ended or f"its process ended with {worker.returncode}: {last}"
    seconds = time.time() - begun[1]
    results.write(Result.of(group[number], device, reason=reason, seconds=seconds))
    results.clear_marks()
    return group[number + 1 :]


def _watched(
    worker: "subprocess.Popen[bytes]", group: list[Case], results: Results, peak: float
) -> str:
    """Wait for a worker, and end it in a case that takes too long; return why it was ended."""
    limits = {case.name: max(AT_LEAST, PATIENCE * case.seconds(peak)) for case in group}
    told = results.names()
    while worker.poll() is None:
        time.sleep(PAUSE)
        for name in sorted(results.names() - told):
            told.add(name)
            print(f"  {name}", flush=True)
        begun = results.under_way()
        if begun is not None and time.time() - begun[1] > limits[begun[0]]:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            return f"took longer than {limits[begun[0]]:.0f} s and was ended"
    return ""
