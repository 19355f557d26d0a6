# SPDX-License-Identifier: Apache-2.0
"""Evaluate the model while it trains: held-out loss by quarter and by length, and a passkey.

The values are in the line of the step in `metrics.jsonl`. The model is measured as it lies on its
ranks, in evaluation mode and without gradients, and the random state is restored, so training has
the losses that it has without. Windows, documents and prompt are the same at every measurement.

    heldout_by_quarter   mean loss in each quarter of windows of long documents
    heldout_by_length    mean loss of whole documents, by the power of two of their tokens
    passkey_nats         mean loss of the tokens of a passkey's answer, at a quarter of the window

Measurements are spaced by their own time: one is made at the first step at which all measurements
together, this one with the time of the last or the mean of all, whichever is longer, take at most
`SHARE` of the time of the steps. The steps since the last have to pay for it alone, so that time
that was not used does not make a row of them. The time of the first is estimated in forward passes:
a forward and backward is three of them. A step whose loss or gradient is not finite is not
measured: its weights are about to be rewound.

Experts exchange tokens between data ranks, so every data rank makes the same number of forwards:
a rank with fewer windows reads another one again, which is not counted.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from custom_modules.memory.freed import give_back
from data.store import Manifest
from eval.answers.passkey import Prompt, prompts, score
from eval.answers.tokens import text_encoder
from eval.loss.held_out import held_out
from eval.loss.loss_by_length import (
    Documents,
    documents_by_length,
    loss_by_length,
    windows_read,
)
from eval.loss.loss_by_position import token_losses, windows

SHARE = 0.01
"""Largest share of the time of the steps that measurements take."""
WINDOWS = 4
PASSKEY_DEPTH = 0.25
QUARTERS = 4
FORWARDS_OF_A_SEQUENCE = 3
"""Time of a forward and backward, in forwards."""


class WhileTraining(Callback):
    """Measure held-out loss and a passkey at some steps; `StepLog` asks for the values."""

    def __init__(self, store: str, seq_length: int, tokens_per_batch: int, every: int = 0) -> None:
        """Take the store, the plan of a step, and the steps between measurements (0: by time)."""
        if every < 0:
            raise ValueError(f"every is {every}; expected 0 or more steps between measurements")
        self.store, self.seq_length, self.every = store, seq_length, every
        self.sequences = tokens_per_batch // seq_length
        self.windows: list[NDArray[np.int64]] = []
        self.documents: Documents = {}
        self.prompt: Prompt | None = None
        self.next_step: int | None = None
        self.trained = self.spent = 0.0
        self.steps = 0
        self.costs: list[float] = []
        self.of_step = 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read windows, documents and prompt, unless this layout or store cannot be measured."""
        began = time.perf_counter()
        reason = unsupported(
            pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
            fp8=bool(getattr(pl_module.config, "fp8", None)),
            megatron_fsdp=getattr(trainer.strategy.ddp_config, "use_megatron_fsdp", False),
        )
        if not reason:
            try:
                self._read()
            except ValueError as error:
                reason = str(error)
        if reason:
            rank_zero_info(f"the model is not evaluated while it trains: {reason}")
            return
        self.spent = time.perf_counter() - began
        ranks = parallel_state.get_data_parallel_world_size()
        forwards = math.ceil(WINDOWS / ranks) + 1
        forwards += windows_read(self.documents, self.seq_length, ranks)
        self.of_step = forwards / (FORWARDS_OF_A_SEQUENCE * max(1, self.sequences // ranks))
        wait = self.every or math.ceil(self.of_step / SHARE)
        self.next_step = following(trainer.global_step, wait, fixed=bool(self.every))

    def measured_at_step(
        self, trainer: Trainer, pl_module: LightningModule, step: int, seconds: float
    ) -> dict[str, Any]:
        """Return the values of a step that took some seconds; empty for most steps.

        Every rank calls it.
        """
        self.trained += seconds
        self.steps += 1
        if self.next_step is None or step < self.next_step or not finite(trainer):
            return {}
        if not self.every and (wait := self._agreed(self._too_early())):
            self.next_step = step + wait
            return {}
        began = time.perf_counter()
        with undisturbed(trainer.strategy.megatron_parallel):
            model = megatron_model(pl_module)
            quarters = self._by_quarter(model)
            by_length = loss_by_length(model, self.documents)
            assert self.prompt is not None
            _, nats, tokens = score(model, self.prompt)
        give_back()
        cost = time.perf_counter() - began
        self.spent += cost
        self.costs.append(cost)
        wait = self.every or self._agreed(self._wait_after())
        self.next_step = following(step, wait, fixed=bool(self.every))
        return {
            "heldout_loss": sum(quarters) / len(quarters),
            "heldout_by_quarter": quarters,
            "heldout_by_length": by_length,
            "passkey_nats": nats / tokens,
            "evaluation_seconds": cost,
        }

    def _too_early(self) -> int:
        """Return after how many steps a measurement keeps all of them within `SHARE`."""
        of_step = self.trained / self.steps
        cost = expected_cost(self.costs) if self.costs else self.of_step * of_step
        return steps_between(cost, self.spent, self.trained, of_step)

    def _wait_after(self) -> int:
        """Return after how many steps the next measurement is made, just after one."""
        alone = steps_between(expected_cost(self.costs), 0.0, 0.0, self.trained / self.steps)
        return max(1, alone, self._too_early())

    @staticmethod
    def _agreed(steps: int) -> int:
        """Return the number of the first rank, whose clock decides for all."""
        agreed = torch.tensor(steps, device=torch.cuda.current_device())
        dist.broadcast(agreed, 0)
        return int(agreed)

    def _read(self) -> None:
        manifest = Manifest.load(self.store)
        documents = held_out(manifest, self.seq_length + 1, WINDOWS)
        (self.prompt,) = prompts(
            text_encoder(manifest.tokenizer_path), documents[0], length=self.seq_length,
            depth=PASSKEY_DEPTH, trials=1, first=manifest.first_tokens,
        )  # fmt: skip
        self.windows = list(windows(documents, self.seq_length, manifest.first_tokens))
        self.documents = documents_by_length(manifest, self.seq_length)

    def _by_quarter(self, model: LongContextGPT) -> list[float]:
        """Return the mean loss in each quarter of the windows, over all ranks."""
        rank = parallel_state.get_data_parallel_rank()
        size = parallel_state.get_data_parallel_world_size()
        device = torch.device("cuda", torch.cuda.current_device())
        sums = torch.zeros(2, QUARTERS, dtype=torch.float64, device=device)
        for turn in range(math.ceil(len(self.windows) / size)):
            index = turn * size + rank
            window = self.windows[index % len(self.windows)]
            losses, positions = token_losses(model, torch.from_numpy(window[None]).to(device))
            if index < len(self.windows):
                quarters = positions.flatten() * QUARTERS // self.seq_length
                losses = losses.flatten().double()
                sums[0].index_add_(0, quarters, losses)
                sums[1].index_add_(0, quarters, torch.ones_like(losses))
        dist.all_reduce(
            sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        means: list[float] = (sums[0] / sums[1]).tolist()
        return means


def unsupported(*, pipeline_parallel: int, fp8: bool, megatron_fsdp: bool) -> str:
    """Return why a model of a layout is not measured; empty if it can be."""
    if pipeline_parallel > 1:
        return "it has pipeline stages"
    if fp8:
        return "it trains in FP8, whose scales a measurement would change"
    if megatron_fsdp:
        return "its parameters are sharded by Megatron FSDP"
    return ""


def expected_cost(costs: Sequence[float]) -> float:
    """Return the time that the next measurement is expected to take: a quick one is an exception.

    It is the time of the last or the mean of all, whichever is longer.
    """
    return max(costs[-1], sum(costs) / len(costs))


def steps_between(cost: float, spent: float, trained: float, step_seconds: float) -> int:
    """Return after how many steps another measurement keeps all of them within `SHARE`.

    `cost` is the expected time of a measurement, `spent` that of all so far, `trained` that of all
    steps, and `step_seconds` their mean, in seconds. It is 0 if one made now does.
    """
    return max(0, math.ceil(((spent + cost) / SHARE - trained) / step_seconds))


def finite(trainer: Trainer) -> bool:
    """Return whether the step's loss and gradient norm are finite; all ranks have the same."""
    measured = (trainer.callback_metrics.get(name) for name in ("reduced_train_loss", "grad_norm"))
    return all(math.isfinite(float(value)) for value in measured if value is not None)


def following(step: int, wait: int, *, fixed: bool) -> int:
    """Return the step of the next measurement; with a `fixed` interval, a multiple of it."""
    return (step // wait + 1) * wait if fixed else step + wait


def megatron_model(pl_module: LightningModule) -> LongContextGPT:
    """Return the Megatron model in NeMo's wrappers."""
    for module in pl_module.modules():
        if isinstance(module, LongContextGPT):
            return module
    raise TypeError(f"{type(pl_module).__name__} has no LongContextGPT")


@contextmanager
def undisturbed(parallel: Any) -> Iterator[None]:
    """Run in evaluation mode with whole parameters; restore modes and random state afterwards."""
    modes = [(module, module.training) for module in parallel.modules()]
    hooked = [
        chunk.module for chunk in parallel if getattr(chunk.module, "use_forward_hook", False)
    ]
    states = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    of_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    for chunk in hooked:
        chunk.disable_forward_pre_hook()  # gathers what the optimizer step has updated
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        torch.set_rng_state(states[0])
        get_cuda_rng_tracker().set_states(states[1])
        if of_device is not None:
            torch.cuda.set_rng_state(of_device)
