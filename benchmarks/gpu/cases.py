# SPDX-License-Identifier: Apache-2.0
"""The measurements, in the order of their worth, in three lists that fit a rented GPU each.

`first` needs torch and Megatron-Core, `second` Transformer Engine too, `third` is for a GPU that is
there for longer, after the other two. What never ran comes before what is only slow. Seconds are
estimates for an H100: from the steps of 26 November 2026 where they are of steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.sizes import Sizes, layered

Kind = Literal[
    "loss", "mlp", "attention", "stack", "kernels", "step", "parity", "ranks", "killed", "run"
]
Call = Literal["first", "second", "third"]
OURS = "ours"
PLAIN, CHECKPOINTED = "PyTorch", "PyTorch, checkpointed"
"""Blocks of the loss head and the MLP."""
BARE, PRODUCTS = "bare kernel", "products of the projection"
"""Blocks of attention."""
NOTHING_AWAY, ALST = "ours, nothing away", "ALST-like"
"""Stacks."""
PLANNED = "planned"
"""In the place of a layout: the planner's choice for this machine."""
FULL = "full"
"""The layout that it is compared with: full recompute, no tiling, no offload."""
PLAIN_FP8 = "tile-loss"
"""Takes every recipe of FP8: a tiled MLP excludes `delayed`."""
FP8_RECIPES = ("tensorwise", "delayed", "blockwise")
LEARNED_IN = ("tensorwise", "blockwise")
"""Recipes of the shipped recipes for Hopper, whose loss is compared after more steps."""
WITH_OPTIMIZER_ON_HOST = "adam-on-host:0.5"
H100_TFLOPS = 989.0
PATIENCE, MARGIN = 2.0, 15.0
"""A case that takes longer than this multiple of its estimate, and these seconds, is ended."""
ON_CPU_SECONDS, ON_CPU_LIMIT = 2.0, 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement."""

    call: Call
    kind: Kind
    settings: dict[str, Any]
    """Arguments of the measurement, as JSON has them."""
    seconds: float
    """About what it takes on an H100."""
    alone: bool = False
    """Whether it may run out of memory: it has a process of its own, and comes last."""

    @property
    def name(self) -> str:
        """Its file's name without suffix, unique."""
        text = " ".join([self.kind, *(f"{value}" for value in self.settings.values())])
        return "".join(c if c.isalnum() else "_" for c in text)

    def estimate(self, device: str, peak_tflops: float) -> float:
        """Return about how many seconds it takes on a device."""
        if device == "cpu":
            return ON_CPU_SECONDS
        return self.seconds * max(1.0, H100_TFLOPS / peak_tflops)

    def limit(self, device: str, peak_tflops: float) -> float:
        """Return after how many seconds it is ended."""
        if device == "cpu":
            return ON_CPU_LIMIT
        return PATIENCE * self.estimate(device, peak_tflops) + MARGIN


def all_cases(sizes: Sizes) -> list[Case]:
    """Return every case of these sizes; names are unique."""
    found = [*_first(sizes), *_second(sizes), *_third(sizes)]
    return sorted(found, key=lambda case: (_ORDER[case.call], case.alone))


_ORDER = {"first": 0, "second": 1, "third": 2}


def _first(sizes: Sizes) -> Iterator[Case]:
    yield Case(call="first", kind="loss", settings={}, seconds=40)
    yield Case(call="first", kind="mlp", settings={}, seconds=10)
    for length in sizes.attention.lengths:
        for card in (sizes.card, sizes.whole):
            settings = {"card": card.name, "length": length}
            yield Case(call="first", kind="attention", settings=settings, seconds=7)
    yield _stack("first", "heads at a time", sizes.stack_length, 24)
    yield _stack("first", "offload", sizes.longest_stack, 80)
    yield _stack("first", "ALST", sizes.longest_stack, 60)


def _second(sizes: Sizes) -> Iterator[Case]:
    short, whole = sizes.step_lengths[0], sizes.whole.name
    for precision in ("bf16", *FP8_RECIPES):
        yield _step("second", whole, short, PLAIN_FP8, precision, 12)
    half = layered(sizes.whole, sizes.whole.layers // 2)
    for precision in ("bf16", *LEARNED_IN):
        yield _step(
            "second", half, sizes.learned_length, PLAIN_FP8, precision, 20,
            steps=sizes.learned_steps,
        )  # fmt: skip
    layout = f"{PLAIN_FP8} {WITH_OPTIMIZER_ON_HOST}"
    yield _step("second", whole, short, layout, "bf16", 15)
    yield Case(call="second", kind="ranks", settings={"layouts": "two"}, seconds=90)
    yield Case(call="second", kind="parity", settings={}, seconds=85)
    yield Case(call="second", kind="run", settings={}, seconds=170)
    yield Case(call="second", kind="kernels", settings={}, seconds=40)
    longest = sizes.longest_step
    yield _step("second", layered(sizes.whole, 1), longest, PLANNED, "bf16", 70)
    yield _step("second", whole, longest, PLANNED, "bf16", 40, attention="left out")
    # The planner fills the GPU with it to 96%.
    yield _step("second", layered(sizes.card, 1), longest, PLANNED, "bf16", 105, alone=True)


def _third(sizes: Sizes) -> Iterator[Case]:
    four = layered(sizes.card, 4)
    yield Case(call="third", kind="ranks", settings={"layouts": "four"}, seconds=40)
    yield Case(call="third", kind="killed", settings={}, seconds=120)
    yield Case(call="third", kind="loss", settings={"peers": "all that are carried"}, seconds=60)
    yield _stack("third", "all", sizes.stack_length, 50, alone=True)
    for length in sizes.step_lengths:
        for card in (four, sizes.whole.name):
            yield _step("third", card, length, PLANNED, "bf16", 40)
            yield _step("third", card, length, PLANNED, FP8_RECIPES[0], 40)
            yield _step("third", card, length, FULL, "bf16", 40, alone=True)
    yield _step("third", layered(sizes.whole, 2), sizes.longest_step, PLANNED, "bf16", 120)
    yield _step(
        "third", layered(sizes.card, 2), sizes.longest_step, PLANNED, "bf16", 180, alone=True
    )


def _stack(call: Call, group: str, length: int, seconds: float, *, alone: bool = False) -> Case:
    settings = {"group": group, "length": length}
    return Case(call=call, kind="stack", settings=settings, seconds=seconds, alone=alone)


def _step(
    call: Call, card: str, length: int, layout: str, precision: str, seconds: float,
    *, attention: str = "computed", alone: bool = False, **more: int,
) -> Case:  # fmt: skip
    settings = {
        "card": card, "length": length, "layout": layout, "precision": precision,
        "attention": attention, **more,
    }  # fmt: skip
    return Case(call=call, kind="step", settings=settings, seconds=seconds, alone=alone)
