# SPDX-License-Identifier: Apache-2.0
"""The measurements, in the order of their worth: a session that ends early has the first ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.sizes import Sizes
from recipes.spec.model_card import ModelCard

Kind = Literal[
    "copies", "fork", "loss", "mlp", "attention", "stack", "step", "longest", "run"
]  # fmt: skip
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_CONNECTIONS = "1"
"""The value of cluster files for GPUs before Blackwell."""
COMPARED = ("ours", "ours, nothing away", "ours, full", "ALST-like", "Megatron, full")
"""Stacks of `benchmarks.gpu.stacked` that are run at every length; others run out of memory."""
AT_LONGEST = ("ours", "ours, nothing away", "ours, full", "ALST-like")
LONGEST_OF = ("ours", "ALST-like", "Megatron, full")
MEGATRON = ("Megatron, selective", "keep all")
PLANNED = "planned"
"""In the place of a layout: the planner's choice for this machine."""
REBUILT = "full"
"""The layout that it is compared with: full recompute, no tiling, no offload."""
RATE = 0.35
"""Share of the peak that model FLOPs reach, recompute counted in: for estimates of time."""
OVERHEAD_SECONDS = 12.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement."""

    kind: Kind
    settings: dict[str, Any]
    """Arguments of the measurement, as JSON has them."""
    round: int = 1
    flops: float = 0.0
    """Of the model, over all its runs."""
    overhead: float = OVERHEAD_SECONDS
    """Seconds besides the products."""
    connections: str = USUAL_CONNECTIONS

    @property
    def name(self) -> str:
        """Its file's name without suffix, unique."""
        words = [self.kind, *(f"{value}" for value in self.settings.values())]
        if self.connections != USUAL_CONNECTIONS:
            words.append(f"{self.connections} connections")
        text = " ".join([*words, str(self.round)])
        return "".join(c if c.isalnum() else "_" for c in text)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must be set before CUDA is initialized."""
        return {CONNECTIONS: self.connections}

    def seconds(self, peak_tflops: float) -> float:
        """Return about how long it takes."""
        return self.overhead + self.flops / (RATE * peak_tflops * 1e12)


def all_cases(sizes: Sizes) -> list[Case]:
    """Return every case of these sizes; names are unique."""
    found = [
        Case(kind="copies", settings={}),
        Case(kind="fork", settings={}, overhead=40),
        Case(kind="loss", settings={}, overhead=30),
        Case(kind="mlp", settings={}, overhead=30),
        *_stacks(sizes, sizes.slope_lengths[:2], COMPARED),
        *_steps(sizes, sizes.step_lengths, [sizes.cards[_few(sizes)], sizes.whole]),
        *_attention(sizes),
        *_stacks(sizes, [sizes.longest_stack], AT_LONGEST),
        *_connections(sizes),
        *(Case(kind="longest", settings={"way": way}, overhead=120) for way in LONGEST_OF),
        *_stacks(sizes, sizes.slope_lengths[2:], ("ours", "ALST-like")),
        Case(kind="run", settings={}, overhead=240),
        *_stacks(sizes, sizes.slope_lengths[:1], MEGATRON),
        *_steps(sizes, sizes.step_lengths[-1:], [sizes.of_layers(sizes.layers[1])]),
        *_steps(sizes, sizes.longest_steps[:1], [sizes.whole], precisions=("bf16",)),
        *_steps(sizes, sizes.longest_steps[1:], [sizes.whole], precisions=("bf16",)),
        *_steps(sizes, sizes.longest_steps, [sizes.cards[_few(sizes)]], precisions=("bf16",)),
    ]
    for number in range(2, sizes.rounds + 1):
        found += _stacks(sizes, sizes.slope_lengths[:2], COMPARED, number)
        found += _connections(sizes, number)
    return found


def _few(sizes: Sizes) -> str:
    return sizes.of_layers(sizes.layers[0]).name


def _stacks(
    sizes: Sizes, lengths: Sequence[int], ways: Sequence[str], number: int = 1
) -> Iterator[Case]:
    """Yield each way in turn at each length."""
    for length in lengths:
        for way in ways:
            yield _stack(sizes, length, way, number)


def _stack(
    sizes: Sizes, length: int, way: str, number: int, connections: str = USUAL_CONNECTIONS
) -> Case:
    long = length >= sizes.longest_stack
    card = sizes.of_layers(sizes.layers[0])
    return Case(
        kind="stack",
        settings={"way": way, "length": length},
        round=number,
        flops=(1 if long else 2) * _flops(card, length),
        connections=connections,
    )


def _connections(sizes: Sizes, number: int = 1) -> Iterator[Case]:
    """Yield offload with the queues that its copies have for themselves under 8 connections."""
    for way in ("ours", "ours, nothing away"):
        yield _stack(sizes, sizes.connections_length, way, number, connections="8")


def _attention(sizes: Sizes) -> Iterator[Case]:
    share = sizes.card.heads / sizes.attention.ranks * sizes.card.head_dim
    for length in sizes.attention.lengths:
        forward = 2 * length**2 * share
        once = 3.5 * forward
        yield Case(
            kind="attention", settings={"length": length}, flops=12 * once,
            overhead=OVERHEAD_SECONDS + 8 * sizes.attention.seconds,
        )  # fmt: skip


def _steps(
    sizes: Sizes,
    lengths: Sequence[int],
    cards: Sequence[ModelCard],
    precisions: Sequence[str] = ("bf16", "fp8"),
) -> Iterator[Case]:
    """Yield whole training steps, under the planner's layout and under full recompute alone."""
    for length in lengths:
        for card in cards:
            for precision in precisions:
                yield _step(sizes, card, length, PLANNED, precision)
            if len(precisions) > 1:
                yield _step(sizes, card, length, REBUILT, "bf16")


def _step(sizes: Sizes, card: ModelCard, length: int, layout: str, precision: str) -> Case:
    once = length in sizes.longest_steps
    return Case(
        kind="step",
        settings={"card": card.name, "length": length, "layout": layout, "precision": precision},
        flops=(1 if once else 2) * _flops(card, length),
        overhead=2 * OVERHEAD_SECONDS,
    )


def _flops(card: ModelCard, length: int) -> float:
    """Return the FLOPs of a step with a recompute of its forward."""
    return 4 / 3 * card.flops_per_token(length) * length
