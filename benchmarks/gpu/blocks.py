# SPDX-License-Identifier: Apache-2.0
"""Loss head and MLP compared with other implementations: bytes and time, forward and backward."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.cases import CHECKPOINTED, OURS, PLAIN
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.out_of_memory import out_of_memory
from benchmarks.harness.rounds import in_turns
from benchmarks.mlp import Mlp
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.tiling.cross_entropy import tiled_cross_entropy
from custom_modules.tiling.mlp import TokenFunction, tiled

NOT_INSTALLED = "not installed: pip install {}"
CHUNK = 4096
"""Tokens of a chunk of PyTorch's compiled loss, as of ours by default."""


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
    rounds: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    norms: list[float] = field(default_factory=list)
    """Of what is returned, to be compared with the others'."""
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
    norms: dict[str, list[float]] = {}
    reasons = {block.name: block.reason for block in blocks}
    times: dict[str, list[float]] = {block.name: [] for block in blocks}
    for block in blocks:
        if block.reason:
            continue
        try:
            norms[block.name] = [float(t.double().norm()) for t in block.run()]  # and compiles
            device.free()
            extra[block.name] = device.extra_bytes(block.run)
        except torch.OutOfMemoryError as raised:
            reasons[block.name] = out_of_memory(raised)
        except Exception as raised:  # a peer may raise anything; its reason goes into the table
            reasons[block.name] = f"fails: {type(raised).__name__}: {raised}".splitlines()[0]
        device.free()
    able = [block for block in blocks if not reasons[block.name]]
    for block in in_turns(able, rounds):
        times[block.name].append(device.seconds(block.run))
    return [
        Measured(reason=reasons[block.name])
        if reasons[block.name]
        else Measured(
            seconds=statistics.median(times[block.name]), rounds=times[block.name],
            extra_bytes=extra[block.name], norms=norms[block.name],
        )
        for block in blocks
    ]  # fmt: skip


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


Loss = Callable[..., Tensor]
"""Of x [N, h], weight [V, h] and labels [N], the sum of the losses."""


def _ours(tile: int) -> Loss:
    def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return tiled_cross_entropy(x[:, None], weight, labels[None], tile=tile).sum()

    return loss


def _plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (x @ weight.t()).float()  # as Megatron and transformers do
    return cross_entropy(logits, labels, reduction="sum")


def _linear_cross_entropy(**options: Any) -> Loss:
    function = torch.nn.functional.linear_cross_entropy
    chosen = torch.nn.LinearCrossEntropyOptions(**options)
    return partial(function, reduction="sum", options=chosen)


def _liger(**options: Any) -> Loss:
    module = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction
    dtype = options.get("accum_dtype")
    return lambda x, weight, labels: function.apply(
        x, weight, labels, None, None, -100, 0.0, 0.0, "sum", None, False, dtype
    )[0]


def _liger_hopper() -> Loss:
    module = import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    function = module.LigerFusedLinearCrossEntropySM90Function
    return lambda x, weight, labels: function.apply(x, weight, labels, -100, "sum")


def _quack() -> Loss:
    function = import_module("quack.linear_cross_entropy").ChunkedLinearCrossEntropyFunction
    return lambda x, weight, labels: function.apply(x, weight, labels, -100, "sum")


def _cut_cross_entropy() -> Loss:
    return partial(import_module("cut_cross_entropy").linear_cross_entropy, reduction="sum")


IN_TORCH = "torch>=2.13"
LOSS_PEERS: dict[str, tuple[Callable[[], Loss], str]] = {
    PLAIN: (lambda: _plain, ""),
    "linear_cross_entropy": (_linear_cross_entropy, IN_TORCH),
    "linear_cross_entropy, sums in fp32": (
        partial(_linear_cross_entropy, acc_policy="balanced"),
        IN_TORCH,
    ),
    "Liger": (_liger, "liger-kernel"),
    "Liger, sums in fp32": (partial(_liger, accum_dtype=torch.float32), "liger-kernel"),
    "Liger for Hopper": (_liger_hopper, "'liger-kernel[cutedsl]'"),
    "QuACK": (_quack, "quack-kernels"),
    "Cut Cross-Entropy": (_cut_cross_entropy, "cut-cross-entropy"),
}
"""For each peer of the loss head the function that makes it, and the package that has it."""


def loss(sizes: Sizes, *, peers: str = "") -> dict[str, Any]:
    """Measure LM head and cross-entropy: ours at each tile, and every peer that is installed.

    `peers` only names a later measurement, with peers that the first one did not have.
    """
    device, card = Device(torch.device(sizes.device)), sizes.card
    where: Where = {"dtype": getattr(torch, sizes.dtype), "device": device.device}
    x = torch.randn(sizes.loss_tokens, card.hidden, **where)
    weight = torch.randn(card.vocab, card.hidden, **where) / card.hidden**0.5
    labels = torch.randint(0, card.vocab, (sizes.loss_tokens,), device=device.device)

    def gradients(loss: Loss) -> list[Tensor]:
        leaves = _leaves(x, weight)
        found = loss(*leaves, labels)
        return [found.detach(), *torch.autograd.grad(found, leaves)]

    blocks = [
        Block(name=f"ours, tiles of {tile:,}", run=partial(gradients, _ours(tile)))
        for tile in sizes.loss_tiles
    ]
    for name, (make, needed) in LOSS_PEERS.items():
        try:
            blocks.append(Block(name=name, run=partial(gradients, make())))
        except (ImportError, AttributeError):
            blocks.append(Block(name=name, run=list, reason=NOT_INSTALLED.format(needed)))
    blocks.append(
        Block(name="PyTorch, compiled chunks", run=partial(_in_chunks, x, weight, labels))
    )
    return _figures(blocks, device, sizes, sizes.loss_tokens, sizes.loss_tiles[0])


def _in_chunks(x: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the loss and both gradients, of chunks of tokens whose loss is compiled."""
    leaf = weight.detach().requires_grad_()
    total, dx = torch.zeros((), device=x.device), torch.empty_like(x)
    compiled = _compiled()
    for start in range(0, len(x), CHUNK):
        rows = slice(start, start + CHUNK)
        chunk = x[rows].detach().requires_grad_()
        found = compiled(chunk, leaf, labels[rows])
        found.backward()
        total += found.detach()
        assert chunk.grad is not None
        dx[rows] = chunk.grad
    assert leaf.grad is not None
    return [total, dx, leaf.grad]


@cache
def _compiled() -> Loss:
    return torch.compile(_plain, dynamic=False)


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
    return _figures(blocks, device, sizes, sizes.mlp_tokens, tile)


def _figures(
    blocks: Sequence[Block], device: Device, sizes: Sizes, tokens: int, tile: int
) -> dict[str, Any]:
    found = zip(blocks, in_turn(blocks, device, sizes.rounds), strict=True)
    return {"tokens": tokens, "tile": tile, "blocks": {b.name: asdict(one) for b, one in found}}
