# SPDX-License-Identifier: Apache-2.0
"""An MLP over tiles of the sequence beside its peers on CPU: time, bytes and matmul FLOPs.

    python -m benchmarks.mlp

Claim: ours takes at most 1/10 of plain PyTorch's extra bytes, and exactly the matmul FLOPs of an
untiled MLP in a checkpoint, inside a recomputed layer too.

    out = W2 act(W1 x)        SwiGLU: silu(gate) * up, gate and up from one W1; GELU: gelu

for x in Megatron's layout [s, b, h], forward and backward. Contestants: ours; PyTorch as written
above; the same in `torch.utils.checkpoint`; the same through `torch.compile`, where a C++ compiler
is found; DeepSpeed's `TiledMLP` with tiles of the same size. Each is first compared with PyTorch.

Extra bytes: in the forward the peak less the output, in the backward less dx and the gradients of
the weights, the larger of the two. x, weights and the output's gradient are there before and not
counted, and the output is let go before the backward, as a layer's residual lets it go. Counted by
`custom_modules.profiling.byte_counter`, live tensors by operator, which does not see inside
compiled code; and by what PyTorch's CPU allocator hands out meanwhile (`torch.profiler`), kernels'
workspaces included, which sees all.

FLOPs are those of the matrix products that run, in units of one forward: alone, and inside a layer
`t + mlp(t)` that is rebuilt in the backward: by `custom_modules.memory.recompute` for ours, by
`torch.utils.checkpoint` for the others. In time contestants run in turn, the first of a round is
the last of the next, and times are medians over rounds.
"""

import argparse
import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from benchmarks.harness.machine import facts
from benchmarks.harness.page import mebibytes, milliseconds, page, table, write
from benchmarks.harness.peers import deepspeed_tiled_mlp
from benchmarks.harness.rounds import in_turns
from custom_modules.memory.recompute import Checkpoint, recomputed
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.tiling.mlp import TokenFunction, tiled

MOST_BYTES = 1 / 10
"""Of plain PyTorch's, that the claim allows."""
PLAIN, CHECKPOINTED = "PyTorch", "PyTorch, checkpointed"
TOLERANCE = 1e-4
"""Of the largest value, in fp32: sums of rounding over tokens."""
Function = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """Two projections without bias and what is between them."""

    def __init__(self, hidden: int, inner: int, activation: str, **where: Any) -> None:
        """Draw weights so that outputs are of order 1; `where` is a device and a dtype."""
        super().__init__()
        self.gated = activation == "SwiGLU"
        self.first = nn.Linear(hidden, inner * (1 + self.gated), bias=False, **where)
        self.second = nn.Linear(inner, hidden, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., h] for x [..., h]."""
        t = self.first(x)
        if self.gated:
            gate, up = t.chunk(2, -1)
            return self.second(nn.functional.silu(gate) * up)
        return self.second(nn.functional.gelu(t))


@dataclass(slots=True)
class Contestant:
    """A way to run an MLP, and what was found of it."""

    name: str
    run: Function
    layer: Callable[[Function], Function]
    """What makes a rebuilt layer of a function."""
    reason: str = ""
    """Why it was not measured."""
    counted: bool = True
    """Whether its operators can be seen."""
    error: float = float("nan")
    extra_bytes: int = 0
    allocated_bytes: int = 0
    forwards: float = 0.0
    """FLOPs in units of one forward."""
    forwards_in_layer: float = 0.0
    seconds: list[float] = field(default_factory=list)


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products; PyTorch's own counter cannot enter a module twice."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def _ours(mlp: Mlp, tile: int) -> Function:
    function = TokenFunction(run=mlp, parameters=tuple(mlp.parameters()), ends_layer=True)
    return partial(tiled, function=function, tile=tile)


def _deepspeed(mlp: Mlp, tile: int) -> Function:
    tiled_mlp = deepspeed_tiled_mlp()

    def run(x: Tensor) -> Tensor:
        shards = -(-x.shape[0] // tile)
        out: Tensor = tiled_mlp.apply(
            lambda module, part: module(part), mlp, x.transpose(0, 1), shards,
            list(mlp.parameters()),
        )  # fmt: skip
        return out.transpose(0, 1)

    return run


def _rebuilt_by_ours(function: Function) -> Function:
    how = Checkpoint(keep_attention=False)
    return lambda x: recomputed(x, lambda t: t + function(t), how)


def _rebuilt_by_torch(function: Function) -> Function:
    return lambda x: checkpoint(lambda t: t + function(t), x, use_reentrant=True)


def contestants(mlp: Mlp, tile: int) -> list[Contestant]:
    """Return all, those that cannot run here with the reason."""
    compiled = Contestant(
        f"{PLAIN}, compiled",
        torch.compile(mlp, dynamic=False),
        _rebuilt_by_torch,
        counted=False,
    )
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        compiled.reason = "no C++ compiler found, which torch.compile needs on a CPU"
    found = [
        Contestant("ours", _ours(mlp, tile), _rebuilt_by_ours),
        Contestant(PLAIN, mlp, _rebuilt_by_torch),
        Contestant(
            CHECKPOINTED,
            lambda x: checkpoint(mlp, x, use_reentrant=True),
            _rebuilt_by_torch,
        ),
        compiled,
    ]
    try:
        found.append(Contestant("DeepSpeed", _deepspeed(mlp, tile), _rebuilt_by_torch))
    except ModuleNotFoundError:
        missing = "not installed: pip install -e '.[bench]'"
        found.append(Contestant("DeepSpeed", mlp, _rebuilt_by_torch, missing))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An MLP, its input [s, b, h], and the gradient of its output."""

    mlp: Mlp
    x: Tensor
    grad_out: Tensor

    @classmethod
    def drawn(cls, tokens: int, hidden: int, inner: int, activation: str) -> "Problem":
        """Return a problem of one sequence."""
        torch.manual_seed(0)
        mlp = Mlp(hidden, inner, activation)
        return cls(
            mlp=mlp, x=torch.randn(tokens, 1, hidden), grad_out=torch.randn(tokens, 1, hidden)
        )

    def run(self, function: Function, between: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Return the gradients of x and the weights; `between` is called after the forward."""
        self.mlp.zero_grad()
        x = self.x.detach().requires_grad_()
        # The values of the output are let go, as a layer's are once they are added to its residual.
        edge = get_gradient_edge(function(x))
        between()
        torch.autograd.backward([edge], [self.grad_out])
        return [t.grad for t in (x, *self.mlp.parameters()) if t.grad is not None]


def measure(problem: Problem, given: Sequence[Contestant], rounds: int) -> None:
    """Fill in what is found of each contestant; one that fails or is wrong is not timed."""
    right = [problem.mlp(problem.x).detach(), *problem.run(problem.mlp)]
    unit = _flops(problem, problem.mlp) / 3
    for one in given:
        if not one.reason:
            _check(one, problem, right)
    able = [one for one in given if not one.reason]
    for one in able:
        one.allocated_bytes = _allocated_bytes(problem, one.run)
        if one.counted:
            one.extra_bytes = _extra_bytes(problem, one.run)
            one.forwards = _flops(problem, one.run) / unit
            one.forwards_in_layer = _flops(problem, one.layer(one.run)) / unit
    for one in in_turns(able, rounds):
        start = time.perf_counter()
        problem.run(one.run)
        one.seconds.append(time.perf_counter() - start)


def _check(one: Contestant, problem: Problem, right: list[Tensor]) -> None:
    try:
        out = one.run(problem.x.detach().requires_grad_()).detach()
        found = [out, *problem.run(one.run)]
    except Exception as raised:  # a peer may raise anything; its reason goes into the table
        one.reason = f"fails: {type(raised).__name__}: {raised}".splitlines()[0]
        return
    one.error = max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(found, right, strict=True)
    )
    if not one.error <= TOLERANCE:
        one.reason = f"wrong by {one.error:.0e} of the largest value"


def _flops(problem: Problem, function: Function) -> int:
    with Products() as products:
        problem.run(function)
    return products.flops


def _extra_bytes(problem: Problem, function: Function) -> int:
    peaks = []

    def end() -> None:
        peaks.append(ledger.peak_bytes)
        ledger.restart()

    with ByteCounter() as ledger:
        gradients = problem.run(function, end)
        end()
    return _extra(problem, peaks, gradients)


def _allocated_bytes(problem: Problem, function: Function) -> int:
    """Return the same by the allocator: a profile of its steps, added up."""
    problem.mlp.zero_grad()  # what is freed meanwhile would count against what is allocated
    gc.collect()
    moments: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        gradients = problem.run(function, lambda: moments.append(time.time_ns()))
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    steps = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    live, peaks = 0, [0, 0]
    for moment, size in steps:
        live += size
        backward = moment > moments[0]
        peaks[backward] = max(peaks[backward], live)
    return _extra(problem, peaks, gradients)


def _extra(problem: Problem, peaks: Sequence[int], gradients: Sequence[Tensor]) -> int:
    forward, backward = peaks
    return max(forward - problem.x.nbytes, backward - sum(t.nbytes for t in gradients))


def section(title: str, given: Sequence[Contestant]) -> str:
    """Return the tables of one activation: what was measured, and ours over the others."""
    measured = [
        [one.name, one.reason, *(["-"] * 6)]
        if one.reason
        else [
            one.name, "" if one.counted else "its operators are not seen", f"{one.error:.0e}",
            mebibytes(one.extra_bytes) if one.counted else "-", mebibytes(one.allocated_bytes),
            f"{one.forwards:g}" if one.counted else "-",
            f"{one.forwards_in_layer:g}" if one.counted else "-",
            milliseconds(statistics.median(one.seconds)),
        ]
        for one in given
    ]  # fmt: skip
    head = [
        "mlp", "note", "error", "extra MiB", "allocated MiB", "forwards", "rebuilt layer", "ms",
    ]  # fmt: skip
    head_of_ratios = [
        "ours", "over", "extra bytes", "allocated", "time", "time of rounds", "claim",
    ]  # fmt: skip
    ratios = _ratios([one for one in given if not one.reason])
    return "\n\n".join([f"## {title}", table(head, measured), table(head_of_ratios, ratios)])


def _ratios(given: Sequence[Contestant]) -> list[list[str]]:
    ours, *others = given
    rows = []
    for one in others:
        size = ours.extra_bytes / one.extra_bytes if one.counted else None
        seconds = statistics.median(ours.seconds) / statistics.median(one.seconds)
        of_rounds = [mine / theirs for mine, theirs in zip(ours.seconds, one.seconds, strict=True)]
        claim = ""
        if one.name == PLAIN and size is not None:
            claim = "holds" if size <= MOST_BYTES else "heavier"
        if one.name == CHECKPOINTED:
            alike = ours.forwards == ours.forwards_in_layer == one.forwards
            claim = "holds: FLOPs alike" if alike else "other FLOPs"
        rows.append(
            [
                ours.name, one.name, "-" if size is None else f"{size:.4f}",
                f"{ours.allocated_bytes / one.allocated_bytes:.4f}", f"{seconds:.3f}",
                f"{min(of_rounds):.3f} to {max(of_rounds):.3f}", claim,
            ]
        )  # fmt: skip
    return rows


def by_tile(problem: Problem, tiles: Sequence[int], rounds: int) -> str:
    """Return a table of ours by the size of a tile, with plain PyTorch beside it."""
    ways: list[tuple[str, Function]] = [(PLAIN, problem.mlp)]
    ways += [(f"{n:,}", _ours(problem.mlp, n)) for n in tiles]
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    for name, function in in_turns(ways, rounds):
        start = time.perf_counter()
        problem.run(function)
        seconds[name].append(time.perf_counter() - start)
    rows = [
        [
            name, mebibytes(_extra_bytes(problem, function)),
            milliseconds(statistics.median(seconds[name])),
        ]
        for name, function in ways
    ]  # fmt: skip
    return table(["tile, tokens", "extra MiB", "ms"], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mlp",
        description="Time, bytes and FLOPs of an MLP over tiles beside its peers, on CPU.",
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--hidden", type=int, default=512, help="width of x")
    parser.add_argument("--inner", type=int, default=2048, help="width between the projections")
    parser.add_argument("--tile", type=int, default=1024, help="tokens, ours and DeepSpeed's")
    parser.add_argument(
        "--tiles", type=int, nargs="*", default=[128, 256, 512, 1024, 2048, 4096],
        help="sizes of tiles that ours is also measured at",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    for name in ("tokens", "hidden", "inner", "tile", "rounds"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}; it must be at least 1")
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    given = _arguments()
    load = os.getloadavg()[0]
    sections = [
        f"x [{given.tokens:,}, 1, {given.hidden}], inner {given.inner:,}, fp32, "
        f"{torch.get_num_threads()} threads, tiles of {given.tile}; medians of {given.rounds} "
        f"rounds. The claim is at most {MOST_BYTES:g} of plain PyTorch's extra bytes, and the "
        "FLOPs of the checkpointed MLP, 4 forwards, alone and in a rebuilt layer. DeepSpeed: "
        "`pip install -e '.[bench]'`."
    ]
    for activation in ("SwiGLU", "GELU"):
        problem = Problem.drawn(given.tokens, given.hidden, given.inner, activation)
        found = contestants(problem.mlp, given.tile)
        measure(problem, found, given.rounds)
        sections.append(section(activation, found))
        if given.tiles:
            sections.append(by_tile(problem, given.tiles, given.rounds))
    of_load = {
        "load": f"{load:.1f} running at the start, {os.getloadavg()[0]:.1f} at the end"
    }  # fmt: skip
    text = page("A tiled MLP beside its peers", facts(["deepspeed"]) | of_load, sections)
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
