# SPDX-License-Identifier: Apache-2.0
"""The memory stack on a GPU: loss head, tiled MLP, offload, kept attention, slope of the peak.

    python -m benchmarks.memory_on_gpu --out benchmarks/results/memory_h200_<date>.md

In Llama-8B's geometry, bf16, on one GPU. Parts, by `--parts`, and their claims:

* `loss`: LM head and cross-entropy beside PyTorch, Liger's fused linear cross-entropy and Cut
  Cross-Entropy where they are installed: at most 1/20 of PyTorch's extra bytes, and 1.05 of the
  time of the faster of the two;
* `mlp`: one MLP over tiles at 256K tokens beside PyTorch, checkpointed and not: at most 1/10 of
  PyTorch's extra bytes, and 1.03 of the time of the checkpointed one, which runs the same products;
* `offload`: steps of the full stack with and without offload of layer inputs and attention
  outputs: at most 1.03 of the time with 0.9 of the layer inputs away from the GPU at the end of
  the forward, the last layer's apart, which is needed at once; and the rate of pinned copies;
* `recompute`: kept attention against full recompute at the longest length, both with offload:
  tokens/s and causal MFU;
* `slope`: peak bytes at the lengths given for the full stack and the ALST-like one
  (`benchmarks.stacks`), and what a token adds: at most 0.74 of the ALST-like stack's.

MFU is causal: 6 P + 6 L H D S model FLOPs a token, P the weights that tokens are multiplied with,
recompute not counted, over `--peak-tflops`, by default the dense bf16 peak of an H100 or H200.

A step is run twice, and the second counts: the first makes the pinned memory. Steps that two parts
need are run once. Bytes are the allocator's on CUDA. On a CPU, where the test
runs it at a small size, bytes are those of live tensors and figures mean nothing.

At half a PFLOP/s of attention a step of 4 layers over 512K tokens takes a minute, so `offload` and
`recompute` take some 8 minutes, the rest 3.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.machine import facts
from benchmarks.mlp import Mlp
from benchmarks.page import mebibytes, milliseconds, name_of, page, table, write
from benchmarks.stacks import Found, Shape, Stack, one_rank, step
from custom_modules.activation_memory import LOSS_TILE, MLP_TILE, Offload, Recompute, Tiling
from custom_modules.ledger import Ledger
from custom_modules.tiled_loss import tiled_cross_entropy
from custom_modules.tiled_mlp import TokenFunction, tiled

K = 1024
PARTS = ("loss", "mlp", "offload", "recompute", "slope")
MOST_LOSS_BYTES, MOST_LOSS_TIME = 1 / 20, 1.05
MOST_MLP_BYTES, MOST_MLP_TIME = 1 / 10, 1.03
MOST_OFFLOAD_TIME, LEAST_AWAY = 1.03, 0.9
MOST_SLOPE = 0.74
NOT_INSTALLED = "not installed: pip install {}"
GIB = 2**30


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
            with Ledger() as ledger:
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
    fused = [one.seconds for one in found[2:] if not one.reason]
    claims = [_claim("bytes", found[0].extra_bytes / max(1, found[1].extra_bytes), MOST_LOSS_BYTES)]
    if fused:
        claims.append(_claim("time of the faster", found[0].seconds / min(fused), MOST_LOSS_TIME))
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
        _claim("bytes", found[0].extra_bytes / max(1, found[1].extra_bytes), MOST_MLP_BYTES),
        _claim("time of checkpointed", found[0].seconds / found[2].seconds, MOST_MLP_TIME),
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


def _claim(what: str, ratio: float, most: float) -> str:
    holds = "holds" if ratio <= most else "is missed"
    return f"Of {what}: {ratio:.3f}; the claim of {most:g} {holds}."


class Steps:
    """Steps of the model by stack and length, each run once."""

    def __init__(self, shape: Shape, given: argparse.Namespace) -> None:
        """Begin with none."""
        self.shape = shape
        self.tiles = Tiling(loss=True, loss_tile=given.loss_tile, mlp=True, mlp_tile=given.mlp_tile)
        self.cap_gib = given.cap_gib
        self._found: dict[tuple[str, int], Found] = {}

    def kept(self, seq: int, *, offload: bool) -> Found:
        """Return the full stack's step, or that without its offload."""
        both = Offload(tensors="both", cap_gib=self.cap_gib) if offload else Offload()
        return self._step("kept attention", "kept_attention", both, seq)

    def full(self, seq: int) -> Found:
        """Return the step of the same with attention's forward run again."""
        return self._step("full", "full", Offload(tensors="inputs", cap_gib=self.cap_gib), seq)

    def alst(self, seq: int) -> Found:
        """Return the ALST-like stack's step."""
        return self._run(Stack(name="ALST-like", alst=self.tiles), seq)

    def _step(self, name: str, kind: Any, offload: Offload, seq: int) -> Found:
        stack = Stack(
            name=f"{name}, offload of {offload.tensors}",
            recompute=Recompute(kind=kind),
            tiling=self.tiles,
            offload=offload,
            head_chunked=True,
        )
        return self._run(stack, seq)

    def _run(self, stack: Stack, seq: int) -> Found:
        key = stack.name, seq
        if key not in self._found:
            try:
                self._found[key] = step(self.shape, stack, seq, warm_up=True)
            except ModuleNotFoundError:
                self._found[key] = Found(reason=NOT_INSTALLED.format("longhaul[bench]"))
            except MemoryError as raised:  # of the host
                self._found[key] = Found(reason=str(raised))
        return self._found[key]


def offload_part(steps: Steps, device: Device, given: argparse.Namespace) -> str:
    """Measure steps with and without offload, and return their section."""
    rows, lines = [], []
    for seq in given.lengths:
        on, off = steps.kept(seq, offload=True), steps.kept(seq, offload=False)
        for name, one in (("on", on), ("off", off)):
            rows.append([f"{seq:,}", name, *_step_figures(steps.shape, one, seq, given)])
        if on.reason or off.reason:
            lines.append(f"{seq:,} tokens: not compared.")
            continue
        ratio, away = on.seconds / off.seconds, on.inputs_away
        holds = ratio <= MOST_OFFLOAD_TIME and away >= LEAST_AWAY
        lines.append(
            f"{seq:,} tokens: {ratio:.3f} of the time with {away:.3f} of the layer inputs away; "
            f"the claim of {MOST_OFFLOAD_TIME:g} with {LEAST_AWAY:g} "
            f"{'holds' if holds else 'is missed'}."
        )
    rates = _copy_rates(device, given.copy_mib)
    head = ["tokens", "offload", *_STEP_HEAD]
    return "\n\n".join(["## Offload", rates, table(head, rows), *lines])


_STEP_HEAD = ["s", "tokens/s", "causal MFU", "peak GiB", "inputs away", "note"]


def _step_figures(shape: Shape, one: Found, seq: int, given: argparse.Namespace) -> list[str]:
    if one.reason:
        return [*["-"] * 5, one.reason]
    mfu = shape.model_flops(seq) / one.seconds / given.peak_tflops / 1e12
    return [
        f"{one.seconds:.3f}", f"{seq / one.seconds:,.0f}", f"{mfu:.3f}",
        f"{one.peak_bytes / GIB:.3f}", f"{one.inputs_away:.3f}", "",
    ]  # fmt: skip


def _copy_rates(device: Device, mib: int) -> str:
    if not device.on_cuda:
        return "No pinned copies without CUDA."
    pinned = torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device.device)
    rates = []
    for target, source in ((pinned, there), (there, pinned)):
        copy = partial(target.copy_, source, non_blocking=True)
        copy()
        rates.append(pinned.nbytes / min(device.seconds(copy) for _ in range(5)) / 1e9)
    return f"Pinned copies of {mib:,} MiB: {rates[0]:.1f} GB/s out, {rates[1]:.1f} GB/s back."


def recompute_part(steps: Steps, given: argparse.Namespace) -> str:
    """Measure kept attention against full recompute, and return their section."""
    seq = max(given.lengths)
    kept, full = steps.kept(seq, offload=True), steps.full(seq)
    rows = [
        [name, "", *_step_figures(steps.shape, one, seq, given)]
        for name, one in (("kept attention", kept), ("full", full))
    ]
    line = "Not compared."
    if not (kept.reason or full.reason):
        line = (
            f"Kept attention takes {full.seconds / kept.seconds:.3f} times the rate of full "
            "recompute; 9/7 = 1.286 where attention is all."
        )
    title = f"## Recompute, {seq:,} tokens, offload on"
    return "\n\n".join([title, table(["recompute", "", *_STEP_HEAD], rows), line])


def slope_part(steps: Steps, given: argparse.Namespace) -> str:
    """Measure peaks by length of the full stack and the ALST-like one; return their section."""
    lengths = sorted(given.slope_lengths)
    ways: dict[str, Callable[[int], Found]] = {
        "full stack": partial(steps.kept, offload=True),
        "ALST-like": steps.alst,
    }
    rows, slopes = [], {}
    unit = steps.shape.hidden * steps.shape.dtype.itemsize
    for name, run in ways.items():
        found = [run(seq) for seq in lengths]
        reason = next((one.reason for one in found if one.reason), "")
        if reason:
            rows.append([name, reason, *["-"] * (len(lengths) + 2)])
            continue
        first, last = found[0].peak_bytes, found[-1].peak_bytes
        slopes[name] = (last - first) / (lengths[-1] - lengths[0])
        rows.append(
            [
                name, "", *(f"{one.peak_bytes / GIB:.3f}" for one in found),
                f"{slopes[name]:,.0f}", f"{slopes[name] / unit:.2f}",
            ]
        )  # fmt: skip
    head = [
        "stack", "note", *(f"peak GiB, {seq:,}" for seq in lengths),
        "bytes per token", "layer inputs per token",
    ]  # fmt: skip
    line = "Not compared."
    if len(slopes) == len(ways):
        line = _claim("slope", slopes["full stack"] / slopes["ALST-like"], MOST_SLOPE)
    return "\n\n".join(["## Slope of the peak", table(head, rows), line])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_on_gpu",
        description="The memory stack on a GPU, beside its peers.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    sizes = {
        "--layers": 4, "--hidden": 4096, "--ffn": 14_336, "--heads": 32, "--kv-heads": 8,
        "--head-dim": 128, "--vocab": 128_256, "--loss-tokens": 48 * K, "--mlp-tokens": 256 * K,
        "--loss-tile": LOSS_TILE, "--mlp-tile": MLP_TILE, "--rounds": 5, "--copy-mib": 2048,
    }  # fmt: skip
    for name, size in sizes.items():
        parser.add_argument(name, type=int, default=size)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64 * K, 128 * K, 512 * K])
    parser.add_argument("--slope-lengths", type=int, nargs="+", default=[64 * K, 128 * K, 256 * K])
    parser.add_argument("--cap-gib", type=float, default=96.0, help="host memory for offload")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU, dense bf16")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has none; take --device cpu --dtype float32")
    if len(set(given.slope_lengths)) < 2:
        parser.error(f"--slope-lengths {given.slope_lengths}: a slope needs two lengths")
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    given = _arguments()
    shape = Shape(
        layers=given.layers,
        hidden=given.hidden,
        ffn=given.ffn,
        heads=given.heads,
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        vocab=given.vocab,
        dtype=getattr(torch, given.dtype),
        device=torch.device(given.device),
    )
    torch.manual_seed(0)
    device, steps = Device(shape.device), Steps(shape, given)
    parts: dict[str, Callable[[], str]] = {
        "loss": partial(loss_part, shape, device, given),
        "mlp": partial(mlp_part, shape, device, given),
        "offload": partial(offload_part, steps, device, given),
        "recompute": partial(recompute_part, steps, given),
        "slope": partial(slope_part, steps, given),
    }
    sections = [
        f"{shape.layers} layers, width {shape.hidden}, FFN {shape.ffn}, {shape.heads} heads and "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, vocabulary {shape.vocab:,}, "
        f"{name_of(shape.dtype)} on {shape.device.type}; tiles of {given.loss_tile:,} tokens in "
        f"the loss and {given.mlp_tile:,} in the MLP; MFU of {given.peak_tflops:g} TFLOP/s."
    ]
    text = ""
    packages = ["megatron-core", "triton", "deepspeed", "liger-kernel", "cut-cross-entropy"]
    of_run = facts(packages)
    with ExitStack() as around:
        if {"offload", "recompute", "slope"} & set(given.parts):
            around.enter_context(one_rank(shape.device))
        for name in given.parts:
            sections.append(parts[name]())
            text = page("The memory stack on a GPU", of_run, sections)
            if given.out is not None:  # a run that is ended leaves the parts that it has
                write(given.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
