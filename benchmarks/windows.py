# SPDX-License-Identifier: Apache-2.0
"""Attention within a window compared with what computes the same without one, on CPU.

    python -m benchmarks.windows

Claims, forward and backward: ours takes less CPU time and fewer bytes than masked attention, and
less CPU time than the same kernel without a window where the window holds at most a quarter of its
pairs of tokens. Over a ring, ours sends at most 2 (W - 1) tokens of K and of V in the forward.

A token attends to W tokens, itself included. Contestants, each with the same q, k, v [1, h, S, D]:

* ours: `custom_modules.attention.window` over the CPU flash operator;
* masked: PyTorch's `scaled_dot_product_attention` with a mask [S, S] of booleans, which is what
  transformers runs on a CPU. The mask is made once and is not in the time, since all layers share
  it; it is in the bytes;
* whole: the same flash operator, causal, without a window: what a trainer pays that has none. It
  computes something else, so it is not compared in values;
* flex: PyTorch's `flex_attention` with a block mask. Its row says why, where a device has no
  backward of it.

Contestants run in turn, and the first of a round is the last of the next. Times are medians over
rounds. CPU time is that of the process on the threads that are asked for, one by default: on a
machine with other work it varies less than time. Bytes are those of live tensors at the worst
moment, q, k, v and the output's gradient not counted (`custom_modules.profiling.byte_counter`).

The last table counts, and does not time, what a rank of a ring sends for the same attention: the
keys and values before its chunks (`custom_modules.context_parallel.halo`), or all of them.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.machine import facts
from benchmarks.harness.page import mebibytes, milliseconds, name_of, page, table, write
from benchmarks.harness.ranks import on_ranks
from benchmarks.harness.rounds import in_turns
from custom_modules.attention.registry import CPU_FLASH
from custom_modules.context_parallel.attend import Groups, attend
from custom_modules.context_parallel.halo import windowed_ring_kernel
from custom_modules.context_parallel.ring import ring_kernel
from custom_modules.profiling.byte_counter import ByteCounter

MOST_PAIRS = 1 / 4
"""Share of the pairs of causal attention up to which less time than it is claimed."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the largest value: sums of rounding over keys."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is attended over."""

    length: int
    window: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key within the window over those of causal attention."""
        s, w = self.length, self.window
        return (w * s - w * (w - 1) / 2) / (s * (s + 1) / 2)

    def drawn(self, count: int) -> list[Tensor]:
        """Return tensors [1, h, S, D]."""
        torch.manual_seed(0)
        shape = (1, self.heads, self.length, self.head_dim)
        return [torch.randn(shape).to(self.dtype) for _ in range(count)]


@dataclass(slots=True)
class Contestant:
    """A way to attend, and what was found of it."""

    name: str
    make: Callable[[Setting], Attention]
    """Makes the function, and the mask that it needs."""
    windowed: bool = True
    reason: str = ""
    """Why it was not measured."""
    error: float = float("nan")
    peak_bytes: int = 0
    attention: Attention | None = None
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of forward and backward."""

    @property
    def both(self) -> list[float]:
        """Seconds of forward and backward of each round."""
        return [sum(pair) for pair in zip(self.forward, self.backward, strict=True)]


def _seq_first(t: Tensor) -> Tensor:
    return t.permute(2, 0, 1, 3)


def _flash(setting: Setting, *, window: bool) -> Attention:
    within = setting.window if window else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(
            *map(_seq_first, (q, k, v)), kernel=CPU_FLASH, groups=Groups(None, None),
            causal=True, window=within,
        )  # fmt: skip
        return out.permute(1, 2, 0, 3)

    return run


def _mask(setting: Setting) -> Tensor:
    """Return whether query i attends to key j, [S, S]."""
    ones = torch.ones(setting.length, setting.length, dtype=torch.bool)
    return ones.tril_().triu_(1 - setting.window)


def _masked(setting: Setting) -> Attention:
    mask = _mask(setting)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _flex(setting: Setting) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < setting.window)

    blocks = create_block_mask(within, None, None, setting.length, setting.length, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=blocks)


def contestants() -> list[Contestant]:
    """Return all; the first is what windowed ones are compared with."""
    return [
        Contestant("masked", _masked),
        Contestant("ours", partial(_flash, window=True)),
        Contestant("whole", partial(_flash, window=False), windowed=False),
        Contestant("flex", _flex),
    ]


def measure(setting: Setting, rounds: int) -> list[Contestant]:
    """Return the contestants with what is found; one that fails or is wrong is not timed."""
    *inputs, grad_out = setting.drawn(4)
    found = contestants()
    right = list[Tensor]()
    for one in found:
        answer = _counted(one, setting, inputs, grad_out)
        right = right or answer
        if one.windowed and not one.reason:
            _compare(one, answer, right, TOLERANCE[setting.dtype])
    able = [one for one in found if not one.reason]
    for one in in_turns(able, rounds):
        _time(one, inputs, grad_out)
    return found


def _counted(
    one: Contestant, setting: Setting, inputs: Sequence[Tensor], grad_out: Tensor
) -> list[Tensor]:
    """Return output and gradients of a run whose bytes are counted; nothing if it fails."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    try:
        with ByteCounter() as counter:
            one.attention = one.make(setting)
            out = one.attention(*leaves)
            gradients = torch.autograd.grad(out, leaves, grad_out)
    except Exception as raised:  # a peer may raise anything; its reason goes into the table
        one.reason = f"fails: {type(raised).__name__}: {raised}".splitlines()[0]
        return []
    one.peak_bytes = counter.peak_bytes
    return [out.detach(), *gradients]


def _compare(
    one: Contestant, answer: Sequence[Tensor], right: Sequence[Tensor], tolerance: float
) -> None:
    one.error = max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(answer, right, strict=True)
    )
    if not one.error <= tolerance:
        one.reason = f"wrong by {one.error:.0e} of the largest value"


def _time(one: Contestant, inputs: Sequence[Tensor], grad_out: Tensor) -> None:
    assert one.attention is not None
    leaves = [t.detach().requires_grad_() for t in inputs]
    cpu, start = time.process_time(), time.perf_counter()
    out = one.attention(*leaves)
    middle = time.perf_counter()
    torch.autograd.grad(out, leaves, grad_out)
    end = time.perf_counter()
    one.cpu.append(time.process_time() - cpu)
    one.forward.append(middle - start)
    one.backward.append(end - middle)


def section(setting: Setting, found: Sequence[Contestant]) -> str:
    """Return the tables of one setting: what was measured, and ours over the others."""
    head = [
        "attention", "note", "error", "forward ms", "backward ms", "both ms", "CPU ms", "peak MiB",
    ]  # fmt: skip
    measured = [
        [one.name, one.reason, *(["-"] * 6)] if one.reason else _measured(one) for one in found
    ]
    able = {one.name: one for one in found if not one.reason}
    ours = able.pop("ours", None)
    rows = [_ratios(ours, one, setting) for one in able.values()] if ours else []
    title = (
        f"## {setting.length:,} tokens, a window of {setting.window:,}, {name_of(setting.dtype)}\n"
        f"\nThe window holds {setting.pairs:.3f} of the pairs of causal attention."
    )
    of_ratios = [
        "ours", "over", "forward", "both", "of rounds", "CPU time", "bytes", "claim",
    ]  # fmt: skip
    return "\n\n".join([title, table(head, measured), table(of_ratios, rows)])


def _measured(one: Contestant) -> list[str]:
    forward, cpu = statistics.median(one.forward), statistics.median(one.cpu)
    error = f"{one.error:.0e}" if one.windowed else "-"
    times = (forward, statistics.median(one.backward), statistics.median(one.both), cpu)
    return [one.name, "", error, *map(milliseconds, times), mebibytes(one.peak_bytes)]


def _ratios(ours: Contestant, one: Contestant, setting: Setting) -> list[str]:
    forward = f"{statistics.median(ours.forward) / statistics.median(one.forward):.3f}"
    cpu = statistics.median(ours.cpu) / statistics.median(one.cpu)
    size = ours.peak_bytes / one.peak_bytes
    of_rounds = [mine / theirs for mine, theirs in zip(ours.both, one.both, strict=True)]
    claim = ""
    if one.name == "masked":
        missed = ["slower"] * (cpu >= 1) + ["heavier"] * (size >= 1)
        claim = " and ".join(missed) or "holds"
    if one.name == "whole" and setting.pairs <= MOST_PAIRS:
        claim = "holds" if cpu < 1 else "slower"
    return [
        ours.name, one.name, forward,
        f"{statistics.median(ours.both) / statistics.median(one.both):.3f}",
        f"{min(of_rounds):.3f} to {max(of_rounds):.3f}", f"{cpu:.3f}", f"{size:.4f}", claim,
    ]  # fmt: skip


def sent_by_rank(settings: Sequence[Setting]) -> list[list[int]]:
    """Return of each setting what this rank sends: forward and backward, halo and ring."""
    group = dist.group.WORLD
    assert group is not None
    size = dist.get_world_size(group)
    found = []
    for setting in settings:
        q, k, v, grad_out = (t[:, :, : setting.length // size] for t in setting.drawn(4))
        counts = []
        for kernel in (
            windowed_ring_kernel(CPU_FLASH, group, setting.window),
            ring_kernel(CPU_FLASH, group),
        ):
            with ByteCounter() as counter:
                out, lse = kernel.forward(q, k, v, True, None)
                counts.append(counter.sent_bytes)
                counter.restart()
                kernel.backward(grad_out, q, k, v, out, lse, True, None)
                counts.append(counter.sent_bytes)
        found.append(counts)
    return found


def of_a_ring(ranks: int, settings: Sequence[Setting], timeout: float) -> str:
    """Return the section on what a ring sends."""
    answers = on_ranks(ranks, sent_by_rank, settings, timeout_seconds=timeout)
    rows = []
    for at, setting in enumerate(settings):
        most = [max(answer[at][way] for answer in answers.values()) for way in range(4)]
        token = 2 * setting.heads * setting.head_dim * setting.dtype.itemsize  # K and V
        bound = 2 * (setting.window - 1) * token
        rows.append(
            [
                f"{setting.length:,}", f"{setting.window:,}", *map(mebibytes, most[:2]),
                *map(mebibytes, most[2:]), f"{sum(most[:2]) / sum(most[2:]):.3f}",
                mebibytes(bound), "holds" if most[0] <= bound else "more",
            ]
        )  # fmt: skip
    head = [
        "tokens", "window", "halo, forward MiB", "backward MiB", "ring, forward MiB",
        "backward MiB", "halo over ring", "2 (W - 1) tokens, MiB", "claim",
    ]  # fmt: skip
    return "\n\n".join(
        [
            f"## Sent by a rank of {ranks}",
            "Of the rank that sends most, counted. The backward sends keys and values again, and "
            "their gradients.",
            table(head, rows),
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.windows",
        description="Time and bytes of attention within a window beside its peers, on CPU.",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16_384])
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="of the ring whose bytes are counted")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds until ranks are ended")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    for name in ("heads", "head_dim", "rounds", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}; it is at least 1")
    if given.ranks < 2:
        parser.error(f"--ranks is {given.ranks}; a ring has 2 or more")
    for length in given.lengths:
        if length % (2 * given.ranks):
            parser.error(f"--lengths {length:,} is not divisible by 2 x ranks = {2 * given.ranks}")
    if min(given.windows) < 1 or min(given.windows) >= max(given.lengths):
        parser.error(
            f"--windows {min(given.windows):,} must be at least 1, and below {max(given.lengths):,}"
        )
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    given = _arguments()
    torch.set_num_threads(given.threads)
    load = os.getloadavg()[0]
    settings = [
        Setting(
            length=length, window=window, heads=given.heads, head_dim=given.head_dim,
            dtype=getattr(torch, dtype),
        )
        for dtype in given.dtypes
        for length in given.lengths
        for window in given.windows
        if window < length
    ]  # fmt: skip
    sections = [
        f"Heads: {given.heads} of {given.head_dim}; batch: 1; threads: {given.threads}; medians of "
        f"{given.rounds} rounds. The claims hold for less CPU time and fewer bytes than masked "
        "attention, and for less CPU time than whole attention where the window holds at most "
        f"{MOST_PAIRS:g} of its pairs."
    ]
    for setting in settings:
        sections.append(section(setting, measure(setting, given.rounds)))
    alike = [setting for setting in settings if setting.dtype == settings[0].dtype]
    sections.append(of_a_ring(given.ranks, alike, given.timeout))
    of_load = {
        "load": f"{load:.1f} running at the start, {os.getloadavg()[0]:.1f} at the end"
    }  # fmt: skip
    text = page("Attention within a window beside its peers", facts() | of_load, sections)
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
