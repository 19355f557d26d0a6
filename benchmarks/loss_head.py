# SPDX-License-Identifier: Apache-2.0
"""The LM head's loss beside its peers on CPU, forward and backward: time and bytes.

    python -m benchmarks.loss_head

Claim: ours takes at most 1/20 of the extra bytes and no more time than PyTorch's cross-entropy of
whole logits; with nine of ten tokens masked, at most a quarter of its time.

    loss = cross_entropy(x W^T, labels, reduction="sum")   ->   loss, dx, dW

Contestants: ours, over tiles; PyTorch as written above; the same through `torch.compile`, where a
C++ compiler is found; PyTorch's own `linear_cross_entropy` over chunks, of its size and of the
tile's; DeepSpeed's `TiledFusedLogitsLoss` of the same tile around the same two
lines. Masked tokens have PyTorch's label to ignore; ours has them as a mask.

Each is first compared with PyTorch. Extra bytes are the peak of forward and backward less what
every contestant returns (loss, dx, dW), its inputs not counted: as the operators' tensors are
counted (`custom_modules.profiling.byte_counter`), which does not see inside compiled code, and as
the process's resident set grows, which sees everything, by whole pages. Then they run in turn, the
first of a round is the last of the next, and times are medians over rounds.
"""

import argparse
import ctypes
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
from torch.nn.functional import cross_entropy

from benchmarks.harness.machine import facts
from benchmarks.harness.page import mebibytes, milliseconds, page, table, write
from benchmarks.harness.peers import deepspeed_tiled_loss
from benchmarks.harness.rounds import in_turns
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.tiling.cross_entropy import tiled_cross_entropy

MOST_BYTES, MOST_TIME, MOST_TIME_MASKED = 1 / 20, 1.0, 0.25
"""Of plain PyTorch's, that the claim allows."""
MASKED = 0.9
IGNORED = -100
PLAIN, IN_CHUNKS = "PyTorch", "linear_cross_entropy"
TOLERANCE = 1e-4
"""Of the largest value, in fp32: sums of rounding over tokens or a vocabulary."""
Found = tuple[Tensor, Tensor, Tensor]
"""Loss, dx and dW."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """x [N, 1, d], weight [V, d], and labels [1, N] with `IGNORED` where masked."""

    x: Tensor
    weight: Tensor
    labels: Tensor

    @classmethod
    def drawn(cls, tokens: int, width: int, vocabulary: int, masked: float) -> "Problem":
        """Return a problem whose logits are of order 1, as those of a model."""
        draw = torch.Generator().manual_seed(0)
        labels = torch.randint(0, vocabulary, (1, tokens), generator=draw)
        skipped = torch.rand(1, tokens, generator=draw) < masked
        return cls(
            x=torch.randn(tokens, 1, width, generator=draw),
            weight=torch.randn(vocabulary, width, generator=draw) / width**0.5,
            labels=labels.masked_fill(skipped, IGNORED),
        )

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Return x and weight, to be given gradients."""
        return self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()


@dataclass(slots=True)
class Contestant:
    """A way to the loss and both gradients, and what was found of it."""

    name: str
    run: Callable[[Problem], Found]
    reason: str = ""
    """Why it was not measured."""
    counted: bool = True
    """Whether its operators can be seen."""
    error: float = float("nan")
    extra_bytes: int = 0
    resident_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def _ours(tile: int) -> Callable[[Problem], Found]:
    def run(problem: Problem) -> Found:
        x, weight = problem.leaves()
        mask = problem.labels != IGNORED
        loss = tiled_cross_entropy(x, weight, problem.labels, mask, tile=tile).sum()
        dx, dweight = torch.autograd.grad(loss, (x, weight))
        return loss.detach(), dx, dweight

    return run


def _summed(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x @ weight.t(), labels, ignore_index=IGNORED, reduction="sum")


def _of_whole_logits(summed: Callable[..., Tensor]) -> Callable[[Problem], Found]:
    def run(problem: Problem) -> Found:
        x, weight = problem.leaves()
        loss = summed(x[:, 0], weight, problem.labels[0])
        dx, dweight = torch.autograd.grad(loss, (x, weight))
        return loss.detach(), dx, dweight

    return run


class _Head(nn.Module):
    """What DeepSpeed's loss takes for a model."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def _deepspeed(tile: int) -> Callable[[Problem], Found]:
    tiled_loss = deepspeed_tiled_loss()

    def of_tile(head: _Head, x: Tensor, labels: Tensor) -> Tensor:
        return _summed(x, head.weight, labels)

    def run(problem: Problem) -> Found:
        x, head = problem.leaves()[0], _Head(problem.weight)
        shards = -(-x.shape[0] // tile)
        loss = tiled_loss.apply(
            of_tile, head, x.transpose(0, 1), problem.labels, None, shards, [head.weight], "sum"
        )
        (dx,) = torch.autograd.grad(loss, (x,))
        assert head.weight.grad is not None
        return loss.detach(), dx, head.weight.grad

    return run


def contestants(tile: int) -> list[Contestant]:
    """Return all, those that cannot run here with the reason."""
    plain = Contestant(PLAIN, _of_whole_logits(_summed))
    compiled = Contestant(
        f"{PLAIN}, compiled",
        _of_whole_logits(torch.compile(_summed, dynamic=False)),
        counted=False,
    )
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        compiled.reason = "no C++ compiler found, which torch.compile needs on a CPU"
    found = [Contestant("ours", _ours(tile)), plain, compiled]
    for name, chosen in (("", {}), (f", chunks of {tile:,}", _chunks_of(tile))):
        loss = partial(
            torch.nn.functional.linear_cross_entropy, ignore_index=IGNORED, reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(**chosen),
        )  # fmt: skip
        found.append(Contestant(f"{IN_CHUNKS}{name}", _of_whole_logits(loss), counted=False))
    try:
        found.append(Contestant("DeepSpeed", _deepspeed(tile)))
    except ModuleNotFoundError:
        found.append(Contestant("DeepSpeed", plain.run, "not installed: pip install -e '.[bench]'"))
    return found


def _chunks_of(tile: int) -> dict[str, Any]:
    return {"batch_chunk_size": tile, "chunking_method": None}


def measure(problem: Problem, given: Sequence[Contestant], rounds: int) -> None:
    """Fill in what is found of each contestant; one that fails or is wrong is not timed."""
    right = _of_whole_logits(_summed)(problem)
    for one in given:
        if not one.reason:
            _check(one, problem, right)
    del right
    able = [one for one in given if not one.reason]
    for one in able:
        one.resident_bytes = _resident_growth(one, problem)
        if one.counted:
            one.extra_bytes = _extra_bytes(one, problem)
    for one in in_turns(able, rounds):
        start = time.perf_counter()
        one.run(problem)
        one.seconds.append(time.perf_counter() - start)


def _check(one: Contestant, problem: Problem, right: Found) -> None:
    try:
        found = one.run(problem)
    except Exception as raised:  # a peer may raise anything; its reason goes into the table
        one.reason = f"fails: {type(raised).__name__}: {raised}".splitlines()[0]
        return
    one.error = max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(found, right, strict=True)
    )
    if not one.error <= TOLERANCE:
        one.reason = f"wrong by {one.error:.0e} of the largest value"


def _extra_bytes(one: Contestant, problem: Problem) -> int:
    with ByteCounter() as ledger:
        found = one.run(problem)
    return ledger.peak_bytes - sum(t.nbytes for t in found)


def _resident_growth(one: Contestant, problem: Problem) -> int:
    """Return by how much the resident set was larger than before, less what was returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _status("VmRSS")
    found = one.run(problem)
    return _status("VmHWM") - before - sum(t.nbytes for t in found)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{name} is not in /proc/self/status")


def section(title: str, given: Sequence[Contestant], most_bytes: float, most_time: float) -> str:
    """Return the tables of one mask: what was measured, and ours over the others."""
    measured = [
        [one.name, one.reason, *(["-"] * 4)]
        if one.reason
        else [
            one.name, "" if one.counted else "its tensors are not seen", f"{one.error:.0e}",
            mebibytes(one.extra_bytes) if one.counted else "-", mebibytes(one.resident_bytes),
            milliseconds(statistics.median(one.seconds)),
        ]
        for one in given
    ]  # fmt: skip
    ours, *others = [one for one in given if not one.reason]
    ratios = []
    for one in others:
        size = ours.extra_bytes / one.extra_bytes if one.counted else None
        seconds = statistics.median(ours.seconds) / statistics.median(one.seconds)
        of_rounds = [mine / theirs for mine, theirs in zip(ours.seconds, one.seconds, strict=True)]
        missed = ["heavier"] * (size is not None and size > most_bytes)
        missed += ["slower"] * (seconds > most_time)
        ratios.append(
            [
                ours.name, one.name, "-" if size is None else f"{size:.4f}",
                f"{ours.resident_bytes / max(1, one.resident_bytes):.4f}", f"{seconds:.3f}",
                f"{min(of_rounds):.3f} to {max(of_rounds):.3f}",
                (" and ".join(missed) or "holds") if one.name == PLAIN else "",
            ]
        )  # fmt: skip
    head = ["loss", "note", "error", "extra MiB", "extra resident MiB", "ms"]
    head_of_ratios = [
        "ours", "over", "extra bytes", "extra resident", "time", "time of rounds", "claim",
    ]  # fmt: skip
    return "\n\n".join([f"## {title}", table(head, measured), table(head_of_ratios, ratios)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loss_head",
        description="Time and bytes of the LM head's loss beside its peers, on CPU.",
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256, help="of x")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--tile", type=int, default=512, help="tokens, ours and DeepSpeed's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    for name in ("tokens", "width", "vocabulary", "tile", "rounds"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}; it must be at least 1")
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    given = _arguments()
    load = os.getloadavg()[0]
    sections = [
        f"{given.tokens:,} tokens, width {given.width}, vocabulary {given.vocabulary:,}, fp32, "
        f"{torch.get_num_threads()} threads, tiles of {given.tile}; medians of {given.rounds} "
        "rounds. Extra: the peak of forward and backward on top of inputs, loss, dx and dW; "
        "resident: the same of the process, by what the system counts. Time of rounds: least and "
        "most over the rounds. DeepSpeed: `pip install -e '.[bench]'`."
    ]
    for masked, most_time in ((0.0, MOST_TIME), (MASKED, MOST_TIME_MASKED)):
        problem = Problem.drawn(given.tokens, given.width, given.vocabulary, masked)
        found = contestants(given.tile)
        measure(problem, found, given.rounds)
        title = f"{masked:.0%} of tokens masked: at most {MOST_BYTES:.3f} of plain's extra bytes"
        sections.append(
            section(f"{title} and {most_time:.2f} of its time", found, MOST_BYTES, most_time)
        )
    stands_on = facts(["deepspeed"]) | {
        "load": f"{load:.1f} running at the start, {os.getloadavg()[0]:.1f} at the end"
    }
    text = page("The LM head's loss beside its peers", stands_on, sections)
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
