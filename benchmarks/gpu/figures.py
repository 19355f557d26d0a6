# SPDX-License-Identifier: Apache-2.0
"""Figures of several results: ratios between ways, and what goals ask for.

A result that was disturbed, or has a reason instead of figures, has no part in any of them. Times
of two rentals are not compared: they are of two machines, or of one at two temperatures.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.gpu.cases import (
    ALST,
    BARE,
    CHECKPOINTED,
    FP8_RECIPES,
    LEARNED_IN,
    NOTHING_AWAY,
    OURS,
    PLAIN,
    PLAIN_FP8,
    PLANNED,
    PRODUCTS,
    WITH_OPTIMIZER_ON_HOST,
)
from benchmarks.gpu.results import Result
from benchmarks.gpu.sizes import Sizes, layered

LEAST_AWAY = 0.9
"""Share of the layer inputs that must have left the GPU for the offload's goal."""
MOST_HOST_GIB = 128
RATE_FROM = 128 * 1024
"""Tokens from which attention's blocks have to reach the rate of their kernel."""
ONE_RANK = "one rank"
LAST_STEPS = 10
"""Over which a loss that is compared after many steps is averaged."""


class Value(NamedTuple):
    """A number and the rental that it was measured in."""

    number: float
    rental: str


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
    note: str = ""
    """The reason for a missing value."""

    @property
    def verdict(self) -> str:
        """Whether it holds."""
        if self.value is None:
            return self.note or "not measured"
        holds = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "holds" if holds and self.other else "is missed"


class Figures:
    """What was measured and counts, by what it is of."""

    def __init__(self, results: Mapping[str, Result], sizes: Sizes) -> None:
        """Take all results."""
        self.sizes = sizes
        self.all = list(results.values())
        self.good = [one for one in self.all if one.counts]

    def of_kind(self, kind: str, **settings: Any) -> list[Result]:
        """Return the results of a kind with some settings, those with shorter lengths first."""
        found = [
            one
            for one in self.good
            if one.kind == kind and settings.items() <= one.settings.items()
        ]
        return sorted(found, key=lambda one: one.settings.get("length", 0))

    def one(self, kind: str, **settings: Any) -> Result | None:
        """Return the first of them, or None."""
        return next(iter(self.of_kind(kind, **settings)), None)

    def block(self, kind: str, name: str, what: str) -> Value | None:
        """Return a figure of a block of the loss head or the MLP, or None."""
        found = self.one(kind)
        if found is None or name not in found.figures["blocks"]:
            return None
        block = found.figures["blocks"][name]
        return None if block["reason"] else Value(block[what], found.rental)

    def stacks(self, length: int, way: str) -> list[tuple[Result, dict[str, Any]]]:
        """Return what was found of a stack at a length, with its result."""
        found = [
            (one, one.figures["ways"][way])
            for one in self.of_kind("stack", length=length)
            if way in one.figures["ways"]
        ]
        return [(one, figures) for one, figures in found if not figures["reason"]]

    def seconds(self, length: int, way: str) -> Value | None:
        """Return the median over the rounds of a stack's step, or None."""
        for one, figures in self.stacks(length, way):
            return Value(median(figures["rounds"]), one.rental)
        return None

    def slope(self, way: str) -> float | None:
        """Return the bytes that a token adds to a stack's peak between the two lengths."""
        lengths = (self.sizes.stack_length, self.sizes.longest_stack)
        peaks = [figures["peak_bytes"] for n in lengths for _, figures in self.stacks(n, way)[:1]]
        if len(peaks) < 2:
            return None
        return float(peaks[1] - peaks[0]) / (lengths[1] - lengths[0])

    def attention_rates(self, result: Result) -> dict[tuple[str, str], float]:
        """Return the rate of each block around a kernel, as a share of the kernel's own.

        That of a block with the projection is the share of kernel and products together.
        """
        blocks = [one for one in result.figures["blocks"] if not one["reason"]]
        taken = {(one["kernel"], one["block"]): _taken(one) for one in blocks}
        found = {}
        for one in blocks:
            kernel, name = one["kernel"], one["block"]
            bare, products = taken.get((kernel, BARE)), taken.get((kernel, PRODUCTS), 0.0)
            if name in (BARE, PRODUCTS) or bare is None:
                continue
            alone = bare + products if one["with_products"] else bare
            found[kernel, name] = alone / taken[kernel, name]
        return found

    def disagreements(self, tolerance: float = 1e-3) -> list[str]:
        """Return sentences about ways of a case whose loss or gradient is not the first one's."""
        found = []
        for one in self.of_kind("stack"):
            ways = [(n, w) for n, w in one.figures["ways"].items() if not w["reason"]]
            for name, way in ways[1:]:
                for what in ("loss", "gradient_norm"):
                    if not _near(way[what], ways[0][1][what], tolerance):
                        found.append(
                            f"{name} at {one.settings['length']:,} tokens computes another model: "
                            f"{what} {way[what]:.6g}, not {ways[0][1][what]:.6g}"
                        )
        for kind in ("loss", "mlp"):
            for one in self.of_kind(kind):
                blocks = [(n, b) for n, b in one.figures["blocks"].items() if not b["reason"]]
                right = dict(blocks).get(PLAIN, blocks[0][1])["norms"] if blocks else []
                found += [
                    f"{name} of the {kind} has other results than {PLAIN}"
                    for name, block in blocks
                    if not all(map(_near, block["norms"], right, [10 * tolerance] * len(right)))
                ]
        return found


def _taken(block: Mapping[str, Any]) -> float:
    return median(block["forward"]) + median(block["backward"])


def _near(value: float, right: float, tolerance: float) -> bool:
    return abs(value - right) <= tolerance * abs(right)


def ratio(first: Value | None, second: Value | None) -> float | None:
    """Return the quotient, or None where one is missing.

    Raises ValueError for values of two rentals.
    """
    if first is None or second is None or not second.number:
        return None
    if first.rental != second.rental:
        raise ValueError(f"not compared: {first.rental} and {second.rental} are two rentals")
    return first.number / second.number


def _goal(what: str, bound: float, value: Callable[[], float | None], **more: Any) -> Goal:
    """Return a goal, with the reason where its value cannot be formed."""
    try:
        return Goal(what=what, bound=bound, value=value(), **more)
    except ValueError as error:
        return Goal(what=what, bound=bound, value=None, note=str(error), **more)


def goals(of: Figures) -> list[Goal]:
    """Return every goal with its value."""
    found = [*_blocks(of), *_attention(of), *_stacks(of), *_steps(of), *_precision(of), *_ranks(of)]
    return [*found, *_counts(of)]


def our_loss(sizes: Sizes, tile: int | None = None) -> str:
    """Return the name of our loss head's block with a tile, by default the default one."""
    return f"{OURS}, tiles of {tile or sizes.loss_tiles[0]:,}"


def _blocks(of: Figures) -> Iterator[Goal]:
    ours, extra = our_loss(of.sizes), partial(of.block, what="extra_bytes")
    loss = of.one("loss")
    names = [] if loss is None else [n for n in loss.figures["blocks"] if not n.startswith(OURS)]
    peers = [v for name in names if (v := of.block("loss", name, "seconds")) is not None]
    yield _goal(
        "loss head: extra bytes over PyTorch's", 1 / 20,
        lambda: ratio(extra("loss", ours), extra("loss", PLAIN)),
    )  # fmt: skip
    yield _goal(
        f"loss head: time over the fastest of {len(peers)} others", 1.05,
        lambda: ratio(of.block("loss", ours, "seconds"), min(peers, default=None)),
    )  # fmt: skip
    yield _goal(
        "tiled MLP: extra bytes over PyTorch's", 1 / 10,
        lambda: ratio(extra("mlp", OURS), extra("mlp", PLAIN)),
    )  # fmt: skip
    yield _goal(
        "tiled MLP: time over PyTorch's in a checkpoint", 1.03,
        lambda: ratio(of.block("mlp", OURS, "seconds"), of.block("mlp", CHECKPOINTED, "seconds")),
    )  # fmt: skip


def _attention(of: Figures) -> Iterator[Goal]:
    for card in (of.sizes.card, of.sizes.whole):
        for length in of.sizes.attention.lengths:
            if length < RATE_FROM and of.sizes.device == "cuda":
                continue
            found = of.one("attention", card=card.name, length=length)
            rates = {} if found is None else of.attention_rates(found)
            yield Goal(
                what=f"attention at {length:,} tokens, heads of {card.head_dim}: least rate of "
                f"{len(rates)} blocks over their kernel's",
                bound=0.95, at_least=True, value=min(rates.values(), default=None),
            )  # fmt: skip


def _stacks(of: Figures) -> Iterator[Goal]:
    for length in (of.sizes.stack_length, of.sizes.longest_stack):
        away = next((figures["inputs_away"] for _, figures in of.stacks(length, OURS)), None)
        share = "" if away is None else f"; {away:.2f} of the inputs away, at least {LEAST_AWAY}"
        yield _goal(
            f"offload at {length:,} tokens: time over that without{share}", 1.03,
            partial(_over, of, length, OURS, NOTHING_AWAY),
            other=away is not None and away >= LEAST_AWAY,
        )  # fmt: skip
    ours, theirs = of.slope(OURS), of.slope(ALST)
    yield Goal(
        what="slope of the peak over the ALST-like stack's", bound=0.74,
        value=None if ours is None or not theirs else ours / theirs,
    )  # fmt: skip
    longest = of.sizes.longest_stack
    yield _goal(
        f"rate at {longest:,} tokens over the ALST-like stack's", 2.2,
        partial(_over, of, longest, ALST, OURS), at_least=True,
    )  # fmt: skip


def _over(of: Figures, length: int, first: str, second: str) -> float | None:
    return ratio(of.seconds(length, first), of.seconds(length, second))


def _steps(of: Figures) -> Iterator[Goal]:
    longest = of.sizes.longest_step
    planned = of.of_kind("step", layout=PLANNED, attention="computed")
    whole = of.one("step", card=of.sizes.whole.name, length=longest, attention="computed")
    name = f"{of.sizes.whole.name} at {longest:,} tokens: tokens/s"
    if whole is None:
        name += f", extrapolated to {of.sizes.whole.layers} layers from 1 and 2"
    yield _goal(
        f"{name}, the host at most {MOST_HOST_GIB} GiB", 1578, partial(_rate, of, whole),
        at_least=True,
        other=whole is None or whole.figures["host_gib"] <= MOST_HOST_GIB,
    )  # fmt: skip
    mfu = [
        one.figures["mfu"]
        for one in planned
        if one.settings["length"] == longest and one.settings["card"].startswith(of.sizes.card.name)
    ]
    what = f"least causal MFU of {len(mfu)} steps of {of.sizes.card.name}'s layers at {longest:,}"
    yield Goal(what=what, bound=0.45, at_least=True, value=min(mfu, default=None))
    for what, name, bound in (("peak_bytes", "bytes", 0.10), ("seconds", "time", 0.15)):
        errors = [abs(one.figures["predicted"][what] / one.figures[what] - 1) for one in planned]
        title = f"planner: largest error of {name} over {len(errors)} steps"
        yield Goal(what=title, bound=bound, value=max(errors, default=None))


def _rate(of: Figures, whole: Result | None) -> float | None:
    """Return tokens/s of the whole model, or extrapolated from steps of its first layers."""
    if whole is not None:
        return float(whole.figures["tokens_per_second"])
    card, longest = of.sizes.whole, of.sizes.longest_step
    steps = [
        of.one("step", card=layered(card, layers), length=longest, attention="computed")
        for layers in (1, 2)
    ]
    one, two = (None if s is None else Value(s.figures["seconds"], s.rental) for s in steps)
    if one is None or two is None or ratio(one, two) is None:
        return None
    return longest / (one.number + (card.layers - 1) * (two.number - one.number))


def _precision(of: Figures) -> Iterator[Goal]:
    """Losses after some steps, compared with those in bf16 with the optimizer on the GPU."""
    short = {"card": of.sizes.whole.name, "length": of.sizes.step_lengths[0]}
    right = of.one("step", layout=PLAIN_FP8, precision="bf16", **short)
    wanted: list[tuple[str, float, dict[str, str]]] = [
        (f"loss with FP8 {name}: deviation from bf16", 0.01,
         {"layout": PLAIN_FP8, "precision": name}) for name in FP8_RECIPES
    ]  # fmt: skip
    on_host = {"layout": f"{PLAIN_FP8} {WITH_OPTIMIZER_ON_HOST}", "precision": "bf16"}
    wanted.append(("loss with half of the optimizer on the host: deviation", 1e-3, on_host))
    for what, bound, settings in wanted:
        found = of.one("step", **short, **settings)
        value = None
        if right is not None and found is not None:
            value = _deviation(found.figures["losses"], right.figures["losses"])
        yield Goal(what=what, bound=bound, value=value)
    learned = {"layout": PLAIN_FP8, "steps": of.sizes.learned_steps}
    right = of.one("step", precision="bf16", **learned)
    for name in LEARNED_IN:
        found = of.one("step", precision=name, **learned)
        title = f"loss after {of.sizes.learned_steps} steps with FP8 {name}"
        if right is None or found is None:
            yield Goal(what=f"{title} over bf16's: deviation", bound=0.005, value=None)
            continue
        loss, in_bf16 = (fmean(one.figures["losses"][-LAST_STEPS:]) for one in (found, right))
        title = f"{title} ({loss:.4f}) over bf16's ({in_bf16:.4f}): deviation"
        yield Goal(what=title, bound=0.005, value=_deviation([loss], [in_bf16]))


def _deviation(values: Iterable[float], right: Iterable[float]) -> float:
    away = [abs(a - b) / abs(b) for a, b in zip(values, right, strict=True)]
    return max(away) if all(map(math.isfinite, away)) else math.inf


def _ranks(of: Figures) -> Iterator[Goal]:
    for what, bound in (("losses", 1e-3), ("gradient_norms", 1e-2)):
        away = [
            layout["away"][what]
            for one in of.of_kind("ranks")
            for name, layout in one.figures["layouts"].items()
            if "away" in layout and not name.startswith(ONE_RANK)
        ]
        title = f"{len(away)} layouts of ranks on one GPU: largest deviation of {what}"
        yield Goal(what=title.replace("_", " "), bound=bound, value=max(away, default=None))


def _counts(of: Figures) -> Iterator[Goal]:
    for kind, what in (("parity", "parity in float64 over ranks"), ("kernels", "kernels")):
        found = of.one(kind)
        passed, failed = 0, 0
        if found is not None:
            passed, failed = found.figures["passed"], len(found.figures["failed"])
        whole = found is not None and found.figures["complete"]
        value = float(failed) if failed or (whole and passed) else None
        yield Goal(what=f"tests of {what} that failed ({passed} passed)", bound=0, value=value)
    layouts = [
        layout["reason"]
        for one in of.of_kind("ranks")
        for layout in one.figures["layouts"].values()
    ]
    yield Goal(
        what=f"layouts of ranks on one GPU that failed, of {len(layouts)}", bound=0,
        value=float(sum(map(bool, layouts))) if layouts else None,
    )  # fmt: skip
    run = of.one("run")
    wrong = [] if run is None else [n for n, part in run.figures["parts"].items() if part["reason"]]
    yield Goal(
        what=f"parts of the whole run that failed{': ' if wrong else ''}{', '.join(wrong)}",
        bound=0, value=None if run is None else float(len(wrong)),
    )  # fmt: skip
