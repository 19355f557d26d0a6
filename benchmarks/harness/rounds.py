# SPDX-License-Identifier: Apache-2.0
"""Contestants at one problem, in turn: right against one rank, then bytes, then time.

A problem is whole tensors, alike on every rank, and the answer of one rank that has them all. Each
contestant takes its shard of them in the layout it is made for, outside what is timed. In a round
every contestant runs once, forward and backward, and the first of a round is the last of the next,
so that what drifts on a machine meets them alike. The time of a round is that of the
slowest rank; a result is the median over rounds. Bytes are those of the rank that holds most: what
lives at the worst moment of forward and backward, this rank's inputs and output gradient counted,
kernels' own workspaces not (`custom_modules.profiling.byte_counter`).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.profiling.byte_counter import ByteCounter

T = TypeVar("T")
TOLERANCE = 1e-4
"""Of the largest value, in fp32: sums of its rounding over a long sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Whole tensors [S, b, ...], parameters, the output's gradient, and what one rank answers."""

    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    grad_out: Tensor
    answer: tuple[Tensor, ...]
    """Output, then the gradients of inputs and parameters."""

    @classmethod
    def of(
        cls,
        attend: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        grad_out: Tensor,
        parameters: tuple[Tensor, ...] = (),
    ) -> "Problem":
        """Return the problem with the answer of `attend` on the whole, computed on this rank."""
        leaves = [t.clone().requires_grad_() for t in (*inputs, *parameters)]
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, grad_out)
        return cls(
            inputs=inputs,
            parameters=parameters,
            grad_out=grad_out,
            answer=(out.detach(), *gradients),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A way to attend over a sequence that ranks share."""

    name: str
    kind: str
    positions: Tensor
    """Of this rank, in the order of its shard."""
    attend: Callable[..., Tensor]
    """Takes the problem's inputs and parameters, and returns the output."""
    batch_first: bool = False
    """Whether its inputs and output are [b, s, ...]; else [s, b, ...]."""

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's part in the contestant's layout."""
        mine = whole[self.positions]
        return mine.transpose(0, 1).contiguous() if self.batch_first else mine


@dataclass(slots=True)
class Result:
    """What one contestant was found to do; `reason` where it could not be measured."""

    name: str
    kind: str
    reason: str = ""
    error: float = float("nan")
    """Largest deviation of the output or a gradient, over the largest value."""
    peak_bytes: int = 0
    forward: list[float] = field(default_factory=list)
    """Seconds of each round."""
    backward: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Forward, backward, and both, each the median over rounds."""
        both = [sum(pair) for pair in zip(self.forward, self.backward, strict=True)]
        return (
            statistics.median(self.forward),
            statistics.median(self.backward),
            statistics.median(both),
        )


def measure(
    problem: Problem, contestants: Sequence[Contestant], rounds: int, group: dist.ProcessGroup
) -> list[Result]:
    """Return a result for each contestant; every rank of the group must call it.

    One that fails or is wrong is not timed and says so.
    """
    results = [_checked(problem, contestant, group) for contestant in contestants]
    able = [pair for pair in zip(contestants, results, strict=True) if not pair[1].reason]
    for contestant, result in able:
        result.peak_bytes = int(_largest([_peak_bytes(problem, contestant)], group)[0])
    for contestant, result in in_turns(able, rounds):
        forward, backward = _largest(_seconds(problem, contestant, group), group)
        result.forward.append(forward)
        result.backward.append(backward)
    return results


def in_turns(items: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield all items in each round; the first of a round is the last of the next."""
    for turn in range(rounds):
        first = turn % max(1, len(items))
        yield from (*items[first:], *items[:first])


def _checked(problem: Problem, contestant: Contestant, group: dist.ProcessGroup) -> Result:
    result = Result(contestant.name, contestant.kind)
    reason = ""
    try:
        error = _error(problem, contestant, group)
    except Exception as raised:  # a peer may raise anything; its reason goes into the table
        error, reason = float("nan"), f"fails: {type(raised).__name__}: {raised}".splitlines()[0]
    reasons: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    result.reason = next((given for given in reasons if given), "")
    if not result.reason:
        (result.error,) = _largest([error], group)
        if not result.error <= TOLERANCE:
            result.reason = f"wrong by {result.error:.0e} of the largest value"
    return result


def _error(problem: Problem, contestant: Contestant, group: dist.ProcessGroup) -> float:
    leaves = _leaves(problem, contestant)
    out = contestant.attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, contestant.shard(problem.grad_out))
    for gradient in gradients[len(problem.inputs) :]:
        dist.all_reduce(gradient, group=group)
    sharded = 1 + len(problem.inputs)
    right = [
        contestant.shard(whole) if at < sharded else whole
        for at, whole in enumerate(problem.answer)
    ]
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip((out.detach(), *gradients), right, strict=True)
    )


def _peak_bytes(problem: Problem, contestant: Contestant) -> int:
    leaves, grad_out = _leaves(problem, contestant), contestant.shard(problem.grad_out)
    with ByteCounter() as ledger:
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        out = contestant.attend(*leaves)
        torch.autograd.grad(out, leaves, grad_out.clone())
    return ledger.peak_bytes


def _seconds(problem: Problem, contestant: Contestant, group: dist.ProcessGroup) -> list[float]:
    """Return forward and backward of one run, each until the slowest rank has ended."""
    leaves, grad_out = _leaves(problem, contestant), contestant.shard(problem.grad_out)
    dist.barrier(group=group)
    start = time.perf_counter()
    out = contestant.attend(*leaves)
    dist.barrier(group=group)
    middle = time.perf_counter()
    gradients = torch.autograd.grad(out, leaves, grad_out)
    dist.barrier(group=group)
    end = time.perf_counter()
    del out, gradients
    return [middle - start, end - middle]


def _leaves(problem: Problem, contestant: Contestant) -> list[Tensor]:
    shards = [contestant.shard(whole) for whole in problem.inputs]
    return [t.detach().requires_grad_() for t in (*shards, *problem.parameters)]


def _largest(values: list[float], group: dist.ProcessGroup) -> list[float]:
    over_ranks = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(over_ranks, dist.ReduceOp.MAX, group=group)
    return over_ranks.tolist()
