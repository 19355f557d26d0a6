# SPDX-License-Identifier: Apache-2.0
"""Loss head and MLP compared with other implementations: bytes and time, forward and backward."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.out_of_memory import out_of_memory
from benchmarks.mlp import Mlp
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.tiling.cross_entropy import tiled_cross_entropy
from custom_modules.tiling.mlp import TokenFunction, tiled

OURS, PLAIN, CHECKPOINTED = "ours", "PyTorch", "PyTorch, checkpointed"
LIGER, CCE = "Liger", "Cut Cross-Entropy"
ROUNDS = 5
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

    seconds: float = 0.0
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
        except torch.OutOfMemoryError as raised:
            reasons[block.name] = out_of_memory(raised)
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
    try:
        function = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ModuleNotFoundError:
        return Block(name=LIGER, run=list, reason=NOT_INSTALLED.format("liger-kernel"))

    def run() -> list[Tensor]:
        leaves = _leaves(x, weight)
        found = function.LigerFusedLinearCrossEntropyFunction.apply(
            *leaves, labels, None, None, -100, 0.0, 0.0, "sum"
        )
        return _gradients(found[0] if isinstance(found, tuple) else found, *leaves)

    return Block(name=LIGER, run=run)


def _cut_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Block:
    try:
        function = import_module("cut_cross_entropy").linear_cross_entropy
    except ModuleNotFoundError:
        return Block(name=CCE, run=list, reason=NOT_INSTALLED.format("cut-cross-entropy"))

    def run() -> list[Tensor]:
        leaves = _leaves(x, weight)
        return _gradients(function(*leaves, labels, reduction="sum"), *leaves)

    return Block(name=CCE, run=run)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def loss(sizes: Sizes) -> dict[str, Any]:
    """Measure LM head and cross-entropy: ours, PyTorch's, Liger's and Cut Cross-Entropy."""
    device, card = Device(torch.device(sizes.device)), sizes.card
    where: Where = {"dtype": getattr(torch, sizes.dtype), "device": device.device}
    x = torch.randn(sizes.loss_tokens, card.hidden, **where)
    weight = torch.randn(card.vocab, card.hidden, **where) / card.hidden**0.5
    labels = torch.randint(0, card.vocab, (sizes.loss_tokens,), device=device.device)

    def ours() -> list[Tensor]:
        leaves = _leaves(x, weight)
        losses = tiled_cross_entropy(leaves[0][:, None], leaves[1], labels[None], tile=tile)
        return _gradients(losses.sum(), *leaves)

    def plain() -> list[Tensor]:
        leaves = _leaves(x, weight)
        logits = (leaves[0] @ leaves[1].t()).float()  # as Megatron and transformers do
        return _gradients(cross_entropy(logits, labels, reduction="sum"), *leaves)

    tile = sizes.loss_tile
    blocks = [
        Block(name=OURS, run=ours),
        Block(name=PLAIN, run=plain),
        _liger(x, weight, labels),
        _cut_cross_entropy(x, weight, labels),
    ]
    return _figures(blocks, device, sizes.loss_tokens, tile)


def mlp(sizes: Sizes) -> dict[str, Any]:
    """Measure one MLP: ours over tiles, PyTorch's, and PyTorch's in a checkpoint."""
    device, card = Device(torch.device(sizes.device)), sizes.card
    where: Where = {"dtype": getattr(torch, sizes.dtype), "device": device.device}
    block = Mlp(card.hidden, card.ffn_hidden, "SwiGLU", **where)
    x = torch.randn(sizes.mlp_tokens, 1, card.hidden, **where)
    grad_out = torch.randn_like(x)
    parameters = tuple(block.parameters())
    function = TokenFunction(run=block, parameters=parameters, ends_layer=True)

    def both_ways(name: str, run: Callable[[Tensor], Tensor]) -> Block:
        def both() -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            # The values of the output are let go, as a layer's are once they are in its residual.
            edge = get_gradient_edge(run(leaf))
            torch.autograd.backward([edge], [grad_out])
            gradients = [t.grad for t in (leaf, *parameters) if t.grad is not None]
            block.zero_grad()
            return gradients

        return Block(name=name, run=both)

    tile = sizes.mlp_tile
    blocks = [
        both_ways(OURS, partial(tiled, function=function, tile=tile)),
        both_ways(PLAIN, block),
        both_ways(CHECKPOINTED, lambda t: checkpoint(block, t, use_reentrant=True)),
    ]
    return _figures(blocks, device, sizes.mlp_tokens, tile)


def _figures(blocks: Sequence[Block], device: Device, tokens: int, tile: int) -> dict[str, Any]:
    found = zip(blocks, in_turn(blocks, device, ROUNDS), strict=True)
    return {"tokens": tokens, "tile": tile, "blocks": {b.name: asdict(one) for b, one in found}}
