# SPDX-License-Identifier: Apache-2.0
"""Trainings in processes of their own that take a few steps at a time, when asked.

    with PacedTraining(build, log, threads=2) as training:
        training.start()
        steps = training.steps(3)

NeMo and Megatron-Core keep their state in globals, so two trainings cannot share a process. Each is
forked from one server that has imported NeMo, runs the whole `llm.pretrain` of a recipe, and waits
before a step until its parent asks for more (`benchmarks.harness.paced_steps`). A waiting process
computes nothing, so several trainings take turns within seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from custom_modules.profiling.categories import Category

WITHOUT_EXTENSION = "data.without_cuda_extension"
IN_PROCESS = "benchmarks.harness.paced_steps"
"""What the server imports, and NeMo with it."""
Cause = Literal[
    "data", "forward", "backward", "gradients", "optimizer", "callbacks", "logging", "loop"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step, from its start to that of the next."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""
    loss: float
    gradient_norm: float
    causes: dict[Cause, float]
    """Seconds by cause; their sum is `seconds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of live tensors at the moment of the second step when most are live."""

    peak_bytes: int
    at_peak: dict[Category, int]
    peak_in: str


class PacedTraining:
    """A training in a process of its own, which ends with the context."""

    def __init__(self, build: Callable[[], partial[Any]], log: Path, *, threads: int) -> None:
        """Take what returns a call of `llm.pretrain`, the file of its output, and its threads.

        `build` runs in the process; it must be importable there.
        """
        self._build, self._log, self._threads = build, log, threads
        self._process: BaseProcess | None = None

    def __enter__(self) -> "PacedTraining":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def start(self) -> None:
        """Train up to the start of the first step."""
        self._start("train")
        self._answer()

    def steps(self, number: int) -> list[Step]:
        """Take some steps and return what they took."""
        self._pipe.send(number)
        steps: list[Step] = self._answer()
        return steps

    def held(self) -> Held:
        """Train two steps, count the bytes of the second, and end."""
        self._start("count")
        held: Held = self._answer()
        return held

    def _start(self, task: str) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([WITHOUT_EXTENSION, IN_PROCESS])
        self._pipe, theirs = context.Pipe()
        arguments = (task, theirs, self._build, self._log, self._threads)
        self._process = context.Process(target=_in_process, args=arguments)
        self._process.start()
        theirs.close()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            answer = RuntimeError("the training ended without an answer")
        if isinstance(answer, Exception):
            raise RuntimeError(f"{answer}; the end of its output:\n{self._log.read_text()[-4000:]}")
        return answer


def _in_process(
    task: str, pipe: Connection, build: Callable[[], partial[Any]], log: Path, threads: int
) -> None:
    from benchmarks.harness import paced_steps

    torch.set_num_threads(threads)
    paced_steps.run(task, pipe, build, log)
