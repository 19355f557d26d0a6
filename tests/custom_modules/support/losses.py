# SPDX-License-Identifier: Apache-2.0
"""One language-model loss cut over tensor ranks and tiles, and whole by the formula."""

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.tensor_parallel import TensorParallel
from custom_modules.tiling.cross_entropy import tiled_cross_entropy
from tests.custom_modules.support.zigzag import here, made_up
from tests.reference.loss import loss_with_gradients

HIDDEN, VOCAB = 6, 44
MASKS = ("none", "some", "first half", "one", "all")
"""Of tokens that are masked; "one": all but one."""
UPSTREAMS = ("one", "scalar", "each")
"""Gradient of the losses: 1, one number, one for each token; the latter two NaN where masked."""


class Case(NamedTuple):
    """A loss: shape, what is masked, the objective, the gradient that it is sent, and the tile."""

    length: int
    batch: int
    tile: int
    masked: str = "some"
    upstream: str = "scalar"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    padding: int = 0
    """Rows after those of the vocabulary."""

    def __str__(self) -> str:
        return "-".join(
            [
                f"{self.length}x{self.batch} by {self.tile}",
                f"{self.masked} masked",
                f"{self.upstream} upstream",
                *(["smoothed"] if self.label_smoothing else []),
                *(["z-loss"] if self.z_loss else []),
                *([f"{self.padding} rows of padding"] if self.padding else []),
            ]
        )

    @property
    def objective(self) -> dict[str, float]:
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}


class Whole(NamedTuple):
    """Everything of a case, on every rank alike."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    mask: Tensor | None
    upstream: Tensor


def whole(case: Case) -> Whole:
    length, batch = case.length, case.batch
    hidden, weight, each = made_up((length, batch, HIDDEN), (VOCAB, HIDDEN), (batch, length))
    generator = torch.Generator().manual_seed(1)
    drawn = {"generator": generator, "device": "cpu"}
    labels = here(torch.randint(0, VOCAB, (batch, length), **drawn))
    mask = {
        "none": None,
        "some": here(torch.rand(batch, length, **drawn)) < 0.6,
        "first half": (torch.arange(length) >= length // 2).expand(batch, -1),
        "one": torch.arange(batch * length).view(batch, length) == batch * length - 2,
        "all": torch.zeros(batch, length),
    }[case.masked]
    upstream = {
        "one": torch.ones_like(each),
        "scalar": torch.full_like(each, -0.3),
        "each": each,
    }[case.upstream]
    if mask is not None:
        labels = torch.where(mask == 0, -100, labels)
        if case.upstream != "one":
            upstream = torch.where(mask == 0, torch.nan, upstream)
    return Whole(hidden, weight, labels, mask, upstream)


@cache
def expected(case: Case) -> dict[str, Tensor]:
    """Return the losses and both gradients by the formula."""
    given = whole(case)
    upstream = given.upstream
    if given.mask is not None:
        upstream = torch.where(given.mask == 0, 0.0, upstream)
    found = loss_with_gradients(
        given.hidden, given.weight, given.labels, given.mask, upstream, **case.objective
    )
    return dict(zip(("losses", "hidden", "weight"), found, strict=True))


def computed(
    case: Case, tp: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False
) -> dict[str, Tensor]:
    """Return this rank's losses and gradients."""
    share, shares = (0, 1) if tp is None else (dist.get_rank(tp), dist.get_world_size(tp))
    given = whole(case)
    tokens = given.hidden.chunk(shares)[share] if sequence_parallel else given.hidden
    hidden = tokens.clone().requires_grad_()
    (padding,) = made_up((case.padding, HIDDEN), seed=2)  # rows that would change every softmax
    weight = torch.cat((given.weight, padding)).chunk(shares)[share].clone().requires_grad_()
    losses = tiled_cross_entropy(
        hidden,
        weight,
        given.labels,
        given.mask,
        tile=case.tile,
        tensor_parallel=TensorParallel(group=tp, sequence_parallel=sequence_parallel),
        vocabulary=VOCAB if case.padding else None,
        **case.objective,
    )
    losses.backward(given.upstream)
    return {"losses": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}


def part(
    case: Case, share: int = 0, shares: int = 1, *, sequence_parallel: bool = False
) -> dict[str, Tensor]:
    """Return what `computed` must return on a tensor rank."""
    right = dict(expected(case._replace(tile=1, padding=0)))
    padded = torch.nn.functional.pad(right["weight"], (0, 0, 0, case.padding))
    right["weight"] = padded.chunk(shares)[share]
    if sequence_parallel:
        right["hidden"] = right["hidden"].chunk(shares)[share]
    return right


def largest_difference(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert ours.keys() == right.keys()
    assert all(ours[name].shape == right[name].shape for name in ours)
    return max((ours[name] - right[name]).abs().max().item() for name in ours)
