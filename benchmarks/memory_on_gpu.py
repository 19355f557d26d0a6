# SPDX-License-Identifier: Apache-2.0
"""The memory stack on a GPU: loss head, tiled MLP, offload, kept attention, slope of the peak.

    python -m benchmarks.memory_on_gpu --out benchmarks/results/memory_h200_<date>.md

In Llama-8B's geometry, bf16, on one GPU. Parts, by `--parts`, and their claims:

* `loss`: LM head and cross-entropy beside PyTorch, Liger's fused linear cross-entropy and Cut
  Cross-Entropy where they are installed, at 16K tokens, which PyTorch holds on 80 GB: at most 1/20
  of PyTorch's extra bytes, and 1.05 of the time of the faster of the two;
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
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_blocks import NOT_INSTALLED, Device, claim, loss_part, mlp_part
from benchmarks.harness.machine import facts
from benchmarks.harness.page import name_of, page, table, write
from benchmarks.stacks import Found, Shape, Stack, one_rank, step
from custom_modules.memory.config import LOSS_TILE, MLP_TILE, Offload, Recompute, Tiling

K = 1024
PARTS = ("loss", "mlp", "offload", "recompute", "slope")
MOST_OFFLOAD_TIME, LEAST_AWAY = 1.03, 0.9
MOST_SLOPE = 0.74
GIB = 2**30


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
                self._found[key] = Found(reason=NOT_INSTALLED.format("-e '.[bench]'"))
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
        line = claim("slope", slopes["full stack"] / slopes["ALST-like"], MOST_SLOPE)
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
        "--head-dim": 128, "--vocab": 128_256, "--loss-tokens": 16 * K, "--mlp-tokens": 256 * K,
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
