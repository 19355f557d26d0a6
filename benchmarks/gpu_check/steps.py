# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a micro-batch of each recipe on fake tensors, at its full width.

Two layers per pipeline stage, since all layers are the same, and no FP8, whose casts are kernels.
An operator that does not take the shapes, dtypes or strides that it is given raises, and so does
anything that makes the host wait for the device, except the documented waits.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_check import by_hand, known_waits
from benchmarks.gpu_check.engine_in_python import engine_in_python
from benchmarks.gpu_check.fake_cuda import fake_cuda
from benchmarks.gpu_check.fake_host import fake_host
from benchmarks.gpu_check.fake_ranks import rank_of
from benchmarks.gpu_check.known_experts import even_experts
from benchmarks.gpu_check.recipes import connected, error_in_words, quiet
from recipes.shipped.row import Row
from recipes.spec.layout import Fp8
from recipes.spec.pipeline import is_uneven

LAYERS = 2
DOCUMENTS = 5
"""Documents of a sequence where they are kept apart, of different lengths."""


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """The step of one recipe on one rank."""

    name: str
    stage: str
    """Which pipeline stage: `whole`, `first` or `last`."""
    waits: dict[str, int] = field(default_factory=dict)
    """The host's documented waits for the device, and how often."""
    without_gradient: list[str] = field(default_factory=list)
    """Parameters that the backward did not reach."""
    error: str = ""


def step(call: tuple[Row, bool]) -> Stepped:
    """Take the step of a recipe, on its last pipeline stage if the second says so."""
    row, last = call
    layout = replace(row.layout, fp8=Fp8())
    rank = layout.world_size - 1 if last else 0
    stage = "whole" if layout.pp == 1 else "last" if last else "first"
    waits: list[str] = []
    missing: list[str] = []
    error = ""
    try:
        quiet()
        recipe = replace(row, layout=layout)()
        ends = 2 * is_uneven(row.card.layers, layout.pp)
        recipe.model.config.num_layers = LAYERS * layout.pp - ends
        with rank_of(layout.world_size, rank), fake_cuda(), _of_a_step() as waits:
            model = connected(recipe)[0].module.cuda()
            for parameter in model.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            _run(model, row)
            gc.collect()  # what a dropped graph holds asks CUDA too
            missing = [name for name, p in model.named_parameters() if not _reached(p)]
    except Exception as raised:  # whatever the code under test raises is the result
        error = error_in_words(raised)
    return Stepped(
        name=row.name,
        stage=stage,
        waits=dict(Counter(waits)),
        without_gradient=missing,
        error=error,
    )


@contextmanager
def _of_a_step() -> Iterator[list[str]]:
    with (
        mock.patch.object(torch.autograd, "backward", by_hand.backward),
        mock.patch.object(torch.autograd, "grad", by_hand.grad),
        mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)),
        engine_in_python(),
        fake_host(),
        known_waits.answered() as of_loss,
        even_experts() as of_experts,
    ):
        waits: list[str] = []
        yield waits
        waits += of_loss + of_experts


def _run(model: Any, row: Row) -> None:
    """Run a micro-batch through a stage of the model and back."""
    layout, card = row.layout, row.card
    shape = (layout.micro_batch, row.seq_length // layout.cp.size)
    tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
    batch: dict[str, Any] = {
        "input_ids": tokens,
        "position_ids": torch.zeros_like(tokens),
        "attention_mask": None,
        "labels": tokens,
        "loss_mask": torch.ones(shape, device="cuda"),
    }
    if row.stage.documents == "within":
        batch["packed_seq_params"] = _documents(*shape[:1], row.seq_length)
    came = None
    if not model.pre_process:
        parts = layout.tp if layout.tp > 1 else 1
        came = torch.zeros(
            shape[1] // parts, shape[0], card.hidden, dtype=torch.bfloat16, device="cuda",
            requires_grad=True,
        )  # fmt: skip
        model.set_input_tensor(came)
    out: Tensor = model(**batch)
    by_hand.backward(out, torch.ones_like(out))
    if came is not None and (came.grad is None or came.grad.shape != came.shape):
        raise AssertionError("the stage before gets no gradient")


def _documents(batch: int, seq_length: int) -> Any:
    from custom_modules.attention.documents import Documents

    each = seq_length // DOCUMENTS
    rows = [[each - 7 * place - row for place in range(DOCUMENTS - 1)] for row in range(batch)]
    return Documents.of([[*row, seq_length - sum(row)] for row in rows])


def _reached(parameter: Any) -> bool:
    """Whether a parameter has a gradient of its shape, or its module wrote the main gradient."""
    if getattr(parameter, "grad_added_to_main_grad", False):
        return True
    grad = parameter.grad
    return grad is not None and grad.shape == parameter.shape and grad.device == parameter.device
