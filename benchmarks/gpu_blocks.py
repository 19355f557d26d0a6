# SPDX-License-Identifier: Apache-2.0
"""Loss head and MLP on a GPU beside their peers: bytes and time of one block (`memory_on_gpu`)."""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TypedDict

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.page import mebibytes, milliseconds, table
from benchmarks.mlp import Mlp
from benchmarks.stacks import Shape
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.tiling.cross_entropy import tiled_cross_entropy
from custom_modules.tiling.mlp import TokenFunction, tiled

K = 1024
MOST_LOSS_BYTES, MOST_LOSS_TIME = 1 / 20, 1.05
MOST_MLP_BYTES, MOST_MLP_TIME = 1 / 10, 1.03
NOT_INSTALLED = "not installed: pip install {}"


class Where(TypedDict):
    """What tensors are made of and on."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A function of fresh leaves to one output, to be run forward and backward."""

    name: str
    run: Callable[[], list[Tensor]]
    """Returns the gradients, and the loss where it is one."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Median seconds of forward and backward, and bytes on top of what is returned."""

    seconds: float = float("nan")
    extra_bytes: int = 0
    reason: str = ""


class Device:
    """The clock and the allocator of a device."""

    def __init__(self, device: torch.device) -> None:
        """Take a device."""
        self.device, self.on_cuda = device, device.type == "cuda"

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call, its kernels ended."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def extra_bytes(self, run: Callable[[], list[Tensor]]) -> int:
        """Return by how much the peak of a call exceeds what it returns."""
        if not self.on_cuda:
            with ByteCounter() as ledger:
                returned = run()
            return ledger.peak_bytes - sum(t.nbytes for t in returned)
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        returned = run()
        self.wait()
        return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in returned)

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()


def in_turn(blocks: Sequence[Block], device: Device, rounds: int) -> list[Measured]:
    """Run blocks in turn; the first of a round is the last of the next."""
    extra: dict[str, int] = {}
    reasons = {block.name: block.reason for block in blocks}
    times: dict[str, list[float]] = {block.name: [] for block in blocks}
    for block in blocks:
        if block.reason:
            continue
        try:
            block.run()  # compiles, and tunes what is tuned
            device.free()
            extra[block.name] = device.extra_bytes(block.run)
        except torch.OutOfMemoryError:
            reasons[block.name] = "out of memory"
        except Exception as raised:  # a peer may raise anything; its reason goes into the table
            reasons[block.name] = f"fails: {type(raised).__name__}: {raised}".splitlines()[0]
        device.free()
    able = [block for block in blocks if not reasons[block.name]]
    for turn in range(rounds):
        first = turn % max(1, len(able))
        for block in able[first:] + able[:first]:
            times[block.name].append(device.seconds(block.run))
    return [
        Measured(reason=reasons[block.name])
        if reasons[block.name]
        else Measured(
            seconds=statistics.median(times[block.name]), extra_bytes=extra[block.name]
        )
        for block in blocks
    ]  # fmt: skip


def _gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def _liger(x: Tensor, weight: Tensor, labels: Tensor) -> Block:
    name = "Liger"
    try:
        function = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ModuleNotFoundError:
        return Block(name=name, run=list, reason=NOT_INSTALLED.format("liger-kernel"))

    def run() -> list[Tensor]:
        leaves = _leaves(x, weight)
        found = function.LigerFusedLinearCrossEntropyFunction.apply(
            *leaves, labels, None, None, -100, 0.0, 0.0, "sum"
        )
        return _gradients(found[0] if isinstance(found, tuple) else found, *leaves)

    return Block(name=name, run=run)


def _cut_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Block:
    name = "Cut Cross-Entropy"
    try:
        function = import_module("cut_cross_entropy").linear_cross_entropy
    except ModuleNotFoundError:
        return Block(name=name, run=list, reason=NOT_INSTALLED.format("cut-cross-entropy"))

    def run() -> list[Tensor]:
        leaves = _leaves(x, weight)
        return _gradients(function(*leaves, labels, reduction="sum"), *leaves)

    return Block(name=name, run=run)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def loss_part(shape: Shape, device: Device, given: argparse.Namespace) -> str:
    """Measure the loss head, and return its section."""
    where: Where = {"dtype": shape.dtype, "device": shape.device}
    x = torch.randn(given.loss_tokens, shape.hidden, **where)
    weight = torch.randn(shape.vocab, shape.hidden, **where) / shape.hidden**0.5
    labels = torch.randint(0, shape.vocab, (given.loss_tokens,), device=shape.device)

    def ours() -> list[Tensor]:
        leaves = _leaves(x, weight)
        losses = tiled_cross_entropy(leaves[0][:, None], leaves[1], labels[None], tile=tile)
        return _gradients(losses.sum(), *leaves)

    def plain() -> list[Tensor]:
        leaves = _leaves(x, weight)
        logits = (leaves[0] @ leaves[1].t()).float()  # as Megatron and transformers do
        return _gradients(cross_entropy(logits, labels, reduction="sum"), *leaves)

    tile = given.loss_tile
    blocks = [
        Block(name=f"ours, tiles of {tile:,}", run=ours),
        Block(name="PyTorch", run=plain),
        _liger(x, weight, labels),
        _cut_cross_entropy(x, weight, labels),
    ]
    found = in_turn(blocks, device, given.rounds)
    fused = min(found[2:], key=lambda one: math.inf if one.reason else one.seconds)
    claims = [
        bytes_claim(found[0], found[1], MOST_LOSS_BYTES),
        time_claim("time of the faster", found[0], fused, MOST_LOSS_TIME),
    ]
    title = f"## Loss head, {given.loss_tokens:,} tokens"
    return "\n\n".join([title, _blocks_table(blocks, found), " ".join(claims)])


def mlp_part(shape: Shape, device: Device, given: argparse.Namespace) -> str:
    """Measure the tiled MLP, and return its section."""
    where: Where = {"dtype": shape.dtype, "device": shape.device}
    mlp = Mlp(shape.hidden, shape.ffn, "SwiGLU", **where)
    x = torch.randn(given.mlp_tokens, 1, shape.hidden, **where)
    grad_out = torch.randn_like(x)
    parameters = tuple(mlp.parameters())
    function = TokenFunction(run=mlp, parameters=parameters, ends_layer=True)

    def block(name: str, run: Callable[[Tensor], Tensor]) -> Block:
        def both() -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            # The values of the output are let go, as a layer's are once they are in its residual.
            edge = get_gradient_edge(run(leaf))
            torch.autograd.backward([edge], [grad_out])
            gradients = [t.grad for t in (leaf, *parameters) if t.grad is not None]
            mlp.zero_grad()
            return gradients

        return Block(name=name, run=both)

    tile = given.mlp_tile
    blocks = [
        block(f"ours, tiles of {tile:,}", partial(tiled, function=function, tile=tile)),
        block("PyTorch", mlp),
        block("PyTorch, checkpointed", lambda t: checkpoint(mlp, t, use_reentrant=True)),
    ]
    found = in_turn(blocks, device, given.rounds)
    claims = [
        bytes_claim(found[0], found[1], MOST_MLP_BYTES),
        time_claim("time of checkpointed", found[0], found[2], MOST_MLP_TIME),
    ]
    title = f"## MLP, {given.mlp_tokens:,} tokens"
    return "\n\n".join([title, _blocks_table(blocks, found), " ".join(claims)])


def _blocks_table(blocks: Sequence[Block], found: Sequence[Measured]) -> str:
    rows = [
        [
            block.name, one.reason,
            *(
                ["-"] * 4
                if one.reason
                else [
                    milliseconds(one.seconds), mebibytes(one.extra_bytes),
                    f"{found[0].seconds / one.seconds:.3f}",
                    f"{found[0].extra_bytes / max(1, one.extra_bytes):.4f}",
                ]
            ),
        ]
        for block, one in zip(blocks, found, strict=True)
    ]  # fmt: skip
    return table(["block", "note", "ms", "extra MiB", "time, ours over", "bytes, ours over"], rows)


def bytes_claim(ours: Measured, peer: Measured, most: float) -> str:
    """Return the sentence of a claim about bytes; none is made where a peer was not measured."""
    reason = ours.reason or peer.reason
    if reason:
        return f"Of bytes: no claim, since one of the two was not measured ({reason})."
    return claim("bytes", ours.extra_bytes / max(1, peer.extra_bytes), most)


def time_claim(what: str, ours: Measured, peer: Measured, most: float) -> str:
    """Return the sentence of a claim about time; none is made where a peer was not measured."""
    reason = ours.reason or peer.reason
    if reason:
        return f"Of {what}: no claim, since one of the two was not measured ({reason})."
    return claim(what, ours.seconds / peer.seconds, most)


def claim(what: str, ratio: float, most: float) -> str:
    """Return the sentence that says whether a ratio keeps its claim."""
    holds = "holds" if ratio <= most else "is missed"
    return f"Of {what}: {ratio:.3f}; the claim of {most:g} {holds}."
