# SPDX-License-Identifier: Apache-2.0
"""Figures of several results: medians over rounds, ratios between ways, and what goals ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.gpu.cases import PLANNED, USUAL_CONNECTIONS
from benchmarks.gpu.results import Result
from benchmarks.gpu.sizes import Sizes

LEAST_AWAY = 0.9
"""Share of the layer inputs that must have left the GPU for the offload's goal."""
MOST_HOST_GIB = 128
BARE = "bare kernel"
RATE_FROM = 128 * 1024
"""Tokens from which attention's block has to reach the rate of its kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A figure that is claimed, and its bound."""

    what: str
    bound: float
    at_least: bool = False
    value: float | None
    """None where one of its measurements is missing."""
    other: bool = True
    """Whether its other condition holds, which `what` names."""

    @property
    def verdict(self) -> str:
        """Whether it holds."""
        if self.value is None:
            return "not measured"
        holds = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "holds" if holds and self.other else "is missed"


class Figures:
    """What was measured, by what it is of."""

    def __init__(self, results: Mapping[str, Result], sizes: Sizes) -> None:
        """Take all results."""
        self.sizes = sizes
        self.all = list(results.values())
        self.good = [one for one in self.all if not one.reason]

    def of_kind(self, kind: str) -> list[Result]:
        """Return the results with figures of a kind, those with the shorter lengths first."""
        found = [one for one in self.good if one.kind == kind]
        return sorted(found, key=lambda one: (one.settings.get("length", 0), one.round))

    def one(self, kind: str) -> Result | None:
        """Return the result of a kind that has one case, or None."""
        return next(iter(self.of_kind(kind)), None)

    def stacks(self, length: int, way: str, connections: str = USUAL_CONNECTIONS) -> list[Result]:
        """Return the rounds of a stack's step."""
        return [
            one
            for one in self.of_kind("stack")
            if one.settings == {"way": way, "length": length} and one.connections == connections
        ]

    def stack(
        self, length: int, way: str, what: str, connections: str = USUAL_CONNECTIONS
    ) -> float | None:
        """Return the median of a figure over the rounds of a stack's step, or None."""
        rounds = self.stacks(length, way, connections)
        return median(one.figures[what] for one in rounds) if rounds else None

    def block(self, kind: str, name: str, what: str) -> float | None:
        """Return a figure of a block of the loss head or the MLP, or None."""
        found = self.one(kind)
        block = None if found is None else found.figures["blocks"].get(name)
        return None if block is None or block["reason"] else block[what]

    def slope(self, way: str) -> float | None:
        """Return the bytes that a token adds to a stack's peak, between shortest and longest."""
        peaks = {
            length: peak
            for length in self.sizes.slope_lengths
            if (peak := self.stack(length, way, "peak_bytes")) is not None
        }
        if len(peaks) < 2:
            return None
        first, last = min(peaks), max(peaks)
        return (peaks[last] - peaks[first]) / (last - first)

    def disagreements(self, tolerance: float = 1e-3) -> list[str]:
        """Return sentences about stacks of a length whose loss or gradient is not the others'."""
        found = []
        for length in sorted({one.settings["length"] for one in self.of_kind("stack")}):
            some = [one for one in self.of_kind("stack") if one.settings["length"] == length]
            some.sort(key=lambda one: one.settings["way"] != "ours")
            for what in ("loss", "gradient_norm"):
                right = some[0].figures[what]
                for one in some[1:]:
                    if abs(one.figures[what] - right) > tolerance * abs(right):
                        found.append(
                            f"{one.settings['way']} at {length:,} tokens computes another model: "
                            f"{what} {one.figures[what]:.6g}, not {right:.6g}"
                        )
        return found


def ratio(first: float | None, second: float | None) -> float | None:
    """Return the quotient, or None where one is missing."""
    return None if first is None or not second else first / second


def goals(of: Figures) -> list[Goal]:
    """Return every goal with its value."""
    sizes = of.sizes
    seconds, extra = partial(of.block, what="seconds"), partial(of.block, what="extra_bytes")
    fused = [s for name in ("Liger", "Cut Cross-Entropy") if (s := seconds("loss", name))]
    found = [
        Goal(what="loss head: extra bytes over PyTorch's", bound=1 / 20,
             value=ratio(extra("loss", "ours"), extra("loss", "PyTorch"))),
        Goal(what="loss head: time over the faster of Liger and Cut Cross-Entropy", bound=1.05,
             value=ratio(seconds("loss", "ours"), min(fused, default=None))),
        Goal(what="tiled MLP: extra bytes over PyTorch's", bound=1 / 10,
             value=ratio(extra("mlp", "ours"), extra("mlp", "PyTorch"))),
        Goal(what="tiled MLP: time over PyTorch's in a checkpoint", bound=1.03,
             value=ratio(seconds("mlp", "ours"), seconds("mlp", "PyTorch, checkpointed"))),
        *_attention(of),
        *_offload(of),
        Goal(what="slope of the peak over the ALST-like stack's", bound=0.74,
             value=ratio(of.slope("ours"), of.slope("ALST-like"))),
        Goal(what=f"rate at {sizes.longest_stack:,} tokens over the ALST-like stack's", bound=2.2,
             at_least=True,
             value=ratio(of.stack(sizes.longest_stack, "ALST-like", "seconds"),
                         of.stack(sizes.longest_stack, "ours", "seconds"))),
        *_steps(of),
    ]  # fmt: skip
    return found


def _attention(of: Figures) -> list[Goal]:
    found = []
    measured = {one.settings["length"]: one.figures["blocks"] for one in of.of_kind("attention")}
    for length in of.sizes.attention.lengths:
        if length < RATE_FROM and of.sizes.device == "cuda":
            continue
        both = {
            (b["kernel"], b["block"]): b["forward"] + b["backward"]
            for b in measured.get(length, ()) if not b["reason"]
        }  # fmt: skip
        rates = [
            both[kernel, BARE] / taken
            for (kernel, block), taken in both.items()
            if block == "ulysses" and (kernel, BARE) in both
        ]
        what = f"attention's block at {length:,} tokens: least rate of the bare kernel's"
        found.append(Goal(what=what, bound=0.95, at_least=True, value=min(rates, default=None)))
    return found


def _offload(of: Figures) -> list[Goal]:
    found = []
    for length in (*of.sizes.slope_lengths[:2], of.sizes.longest_stack):
        away = of.stack(length, "ours", "inputs_away")
        value = ratio(
            of.stack(length, "ours", "seconds"), of.stack(length, "ours, nothing away", "seconds")
        )
        share = "" if away is None else f"; {away:.2f} of the inputs away, at least {LEAST_AWAY}"
        what = f"offload at {length:,} tokens: time over that without{share}"
        enough = away is not None and away >= LEAST_AWAY
        found.append(Goal(what=what, bound=1.03, value=value, other=enough))
    return found


def _steps(of: Figures) -> list[Goal]:
    found = []
    planned = [one for one in of.of_kind("step") if one.settings["layout"] == PLANNED]
    longest = max(of.sizes.longest_steps)
    whole = [
        one for one in planned
        if one.settings["card"] == of.sizes.whole.name and one.settings["length"] == longest
    ]  # fmt: skip
    rate = whole[0].figures["tokens_per_second"] if whole else None
    within = bool(whole) and whole[0].figures["host_gib"] <= MOST_HOST_GIB
    found.append(
        Goal(what=f"{of.sizes.whole.name} at {longest:,} tokens: tokens/s, the host at most 128 "
             "GiB", bound=1578, at_least=True, value=rate, other=within)
    )  # fmt: skip
    mfu = [one.figures["mfu"] for one in planned if one.settings["length"] == longest]
    found.append(
        Goal(what=f"causal MFU at {longest:,} tokens", bound=0.45, at_least=True,
             value=max(mfu, default=None))
    )  # fmt: skip
    for what, bound in (("peak_bytes", 0.10), ("seconds", 0.15)):
        errors = _errors(planned, what)
        name = "bytes" if what == "peak_bytes" else "time"
        found.append(
            Goal(what=f"planner: largest error of {name} over {len(errors)} steps", bound=bound,
                 value=max(errors, default=None))
        )  # fmt: skip
    return found


def _errors(steps: Sequence[Result], what: str) -> list[float]:
    return [abs(one.figures["predicted"][what] / one.figures[what] - 1) for one in steps]
