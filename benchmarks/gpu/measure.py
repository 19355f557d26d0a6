# SPDX-License-Identifier: Apache-2.0
"""A case's measurement, and the process that runs some of them in order."""

import gc
import inspect
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import attention, blocks, killed_rank, ranks, stacked, steps, whole_run
from benchmarks.gpu.cases import Case
from benchmarks.gpu.guards import Guard
from benchmarks.gpu.results import Result, Results
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.machine import facts
from benchmarks.harness.out_of_memory import OUT_OF_MEMORY, out_of_memory
from benchmarks.harness.processes import children_of, kill

PACKAGES = (
    "megatron-core", "nemo-toolkit", "triton", "flash-attn", "flash-attn-4", "transformer-engine",
    "deepspeed", "liger-kernel", "cut-cross-entropy", "quack-kernels",
)  # fmt: skip
MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "loss": blocks.loss,
    "mlp": blocks.mlp,
    "attention": attention.attention,
    "stack": stacked.stack,
    "kernels": ranks.kernels,
    "step": steps.step,
    "parity": ranks.parity,
    "ranks": ranks.ranks,
    "killed": killed_rank.killed_run,
    "run": whole_run.run,
}
MOST_WORDS = 400
"""Of a reason: an error of CUDA can be pages long."""
NOT_ENDED = "its process ended before the measurement did; the figures are of what came before"


class Overdue(BaseException):
    """A case has taken too long. Not an Exception: a peer's failure is caught and told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """What the cases of one process have in common."""

    sizes: Sizes
    results: Results
    guard: Guard
    rental: str
    until: float
    """A moment of `time.time`, at which the last case has ended."""
    peak: float
    """TFLOP/s of the device, for estimates."""


def measure(cases: Sequence[Case], session: Session) -> None:
    """Run cases in order and write a result for each; leave out those too long for the time left.

    A case that fails leaves its reason, and so does one that takes too long. One that runs out of
    memory is the last: what it held may stay with the process, and the next would fail for it.
    """
    of_run = facts(PACKAGES)
    gc.collect()
    gc.freeze()  # what was imported: a collection, of which a case has dozens, took a second
    device = session.sizes.device
    for case in cases:
        left = session.until - time.time()
        if case.estimate(device, session.peak) > left:
            continue
        limit = min(case.limit(device, session.peak), left)
        with session.results.begun(case, limit):
            found = _result(case, session, of_run, limit)
            session.results.write(found)
        said = found.reason or "measured"
        if found.disturbed:
            said += f", disturbed: {found.disturbed}"
        print(f"{case.name}: {said}, {found.seconds:.0f} s", flush=True)
        if OUT_OF_MEMORY in found.reason + json.dumps(found.figures):
            return


def _result(case: Case, session: Session, of_run: dict[str, str], limit: float) -> Result:
    torch.manual_seed(0)
    start = time.perf_counter()
    gpu, slow = session.guard.before()
    result = Result.of(
        case, session.sizes.device, rental=session.rental, gpu=gpu, disturbed=slow, facts=of_run,
    )  # fmt: skip

    def note(figures: dict[str, Any]) -> None:
        seconds = time.perf_counter() - start
        found = replace(result, figures=figures, reason=NOT_ENDED, seconds=seconds)
        session.results.write(found)
        result.figures = figures

    run = partial(MEASUREMENTS[case.kind], session.sizes, **case.settings)
    if "note" in inspect.signature(run.func).parameters:
        run = partial(run, note=note)
    try:
        with session.guard.watch() as watch, deadline(limit):
            result.figures = run()
    except torch.OutOfMemoryError as raised:
        result.reason = out_of_memory(raised)
    except Overdue:
        result.reason = f"took longer than {limit:.0f} s and was ended"
    except Exception as raised:  # a peer may raise anything; its reason goes into the file
        traceback.print_exc()
        result.reason = f"{type(raised).__name__}: {raised}".splitlines()[0][:MOST_WORDS]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    result.gpu |= watch.figures()
    if watch.seen:
        others = ", ".join(map(str, sorted(watch.seen)))
        result.disturbed = f"other processes used the GPU: {others}"
    result.seconds = round(time.perf_counter() - start, 2)
    return result


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise Overdue inside the context after some seconds, and end what it has started.

    Python sees the signal between two of its own steps; `benchmarks.gpu.session` ends a process
    that does not come to one.
    """
    before, overdue = children_of(os.getpid()), False

    def ring(*_: object) -> None:
        nonlocal overdue
        overdue = True
        raise Overdue

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if overdue:
            kill(children_of(os.getpid()) - before)
