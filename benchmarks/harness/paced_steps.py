# SPDX-License-Identifier: Apache-2.0
"""The process of a paced training: its steps on request, by cause, and the bytes that one holds.

A step lasts from its start to that of the next, so the loop, its callbacks and its loggers are part
of it. It is divided by the functions of Lightning, NeMo and Megatron-Core that every recipe calls;
a function that is called inside of another one counts for its own cause alone.

| cause | functions |
| --- | --- |
| data | the model's `data_step`: the next micro-batch, collated, and its shard |
| forward, backward | `forward_step` and `backward_step` of Megatron's schedule |
| gradients | zeroing the buffers, and `finalize_model_grads` |
| optimizer | `step` of Megatron's optimizer, clipping included |
| callbacks | hooks of Lightning's and NeMo's callbacks |
| logging | `LightningModule.log`, and the update of the loggers after a step |
| loop | the rest |
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer
from megatron.core.pipeline_parallel import schedules
from nemo.collections.llm.gpt.model.base import GPTModel
from nemo.lightning.megatron_parallel import CallbackConnector
from nemo.lightning.pytorch.optim import MegatronOptimizerModule

from benchmarks.harness.paced_training import CAUSES, Cause, Held, Step
from custom_modules.patching import patched
from custom_modules.profiling.memory_by_category import MemoryByCategory
from custom_modules.profiling.step_memory import Training, name_state, named_parts
from recipes.nemo2.model import LongContextModel

FUNCTIONS: dict[Cause, Sequence[tuple[Any, str]]] = {
    "data": [(GPTModel, "data_step"), (LongContextModel, "data_step")],
    "forward": [(schedules, "forward_step")],
    "backward": [(schedules, "backward_step")],
    "gradients": [
        (DistributedDataParallel, "zero_grad_buffer"),
        (MegatronOptimizerModule, "finalize_model_grads"),
    ],
    "optimizer": [(MixedPrecisionOptimizer, "step"), (ChainedOptimizer, "step")],
    "callbacks": [
        (call, "_call_callback_hooks"),
        (CallbackConnector, "event"),
        (CallbackConnector, "transform_event"),
    ],
    "logging": [
        (LightningModule, "log"),
        (_LoggerConnector, "on_batch_end"),
        (_LoggerConnector, "update_train_step_metrics"),
    ],
}
"""Owner and name of the functions of each cause but `loop`."""


class _End(BaseException):
    """Ends a training that has answered."""


class _Clock:
    """Seconds by cause; the innermost function counts."""

    def __init__(self) -> None:
        self._open: list[Cause] = ["loop"]
        self.restart()

    def restart(self) -> None:
        """Begin with no seconds; open functions stay open."""
        self.seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._since = time.perf_counter()

    def read(self) -> dict[Cause, float]:
        """Return the seconds until now."""
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now
        return self.seconds

    def timed(self, function: Callable[..., Any], cause: Cause) -> Callable[..., Any]:
        """Return the function, whose time counts for a cause."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.read()
            self._open.append(cause)
            try:
                return function(*args, **kwargs)
            finally:
                self.read()
                self._open.pop()

        return run


class _Pace(Callback):
    """Wait before a step until the parent asks for some, and answer with them."""

    def __init__(self, pipe: Connection, clock: _Clock) -> None:
        self.pipe, self.clock = pipe, clock
        self.left, self.cpu = 0, 0.0
        self.steps: list[Step] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        causes, cpu = self.clock.read(), time.process_time()
        if self.left:
            logged = trainer.callback_metrics
            step = Step(
                seconds=sum(causes.values()),
                cpu_seconds=cpu - self.cpu,
                loss=float(logged["reduced_train_loss"]),
                gradient_norm=float(logged["grad_norm"]),
                causes=causes,
            )
            self.steps.append(step)
            self.left -= 1
        if not self.left:
            self.pipe.send(self.steps)
            self.steps, self.left = [], self.pipe.recv()
        self.cpu = time.process_time()
        self.clock.restart()


class _Bytes(Callback):
    """Count the bytes of the second step, and answer with them."""

    def __init__(self, pipe: Connection, memory: MemoryByCategory, entered: ExitStack) -> None:
        self.pipe, self.memory, self.entered = pipe, memory, entered

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.model = [chunk.module for chunk in trainer.strategy.megatron_parallel]
        self.entered.enter_context(named_parts(self.model))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            optimizer = trainer.optimizers[0].mcore_optimizer
            name_state(Training(model=self.model, optimizer=optimizer, step=lambda: None))
            self.memory.restart()
        elif trainer.global_step == 2:
            name, backward = self.memory.peak_in
            held = Held(
                peak_bytes=self.memory.peak_bytes,
                at_peak=self.memory.at_peak,
                peak_in=f"{name}, {'backward' if backward else 'forward'}",
            )
            self.pipe.send(held)
            raise _End


def run(task: str, pipe: Connection, build: Callable[[], partial[Any]], log: Path) -> None:
    """Train with what `build` returns: at the parent's pace, or to count bytes.

    What is printed goes to the log; an error is the answer.
    """
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        if task == "count":
            _count(pipe, build)
        else:
            _train(pipe, build)
    except _End:
        pass
    except BaseException as raised:
        traceback.print_exc()
        pipe.send(RuntimeError(f"{type(raised).__name__}: {raised}"))


def _train(pipe: Connection, build: Callable[[], partial[Any]]) -> None:
    clock = _Clock()
    with _timed(clock):
        pretrain = build()
        # First, so that callbacks that time a step begin after its wait.
        pretrain.keywords["trainer"].callbacks.insert(0, _Pace(pipe, clock))
        pretrain()


def _count(pipe: Connection, build: Callable[[], partial[Any]]) -> None:
    with ExitStack() as entered:
        memory = entered.enter_context(MemoryByCategory())
        pretrain = build()
        pretrain.keywords["trainer"].callbacks.append(_Bytes(pipe, memory, entered))
        pretrain()


@contextmanager
def _timed(clock: _Clock) -> Iterator[None]:
    """Time the functions of every cause inside the context."""
    with ExitStack() as stack:
        for cause, functions in FUNCTIONS.items():
            for owner, name in functions:
                timed = clock.timed(getattr(owner, name), cause)
                stack.enter_context(patched(owner, name, timed))
        yield
