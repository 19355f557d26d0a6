# SPDX-License-Identifier: Apache-2.0
"""The page of results: goals first, then a table a kind, the device, and what was not measured."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.cases import BARE, OURS, Case
from benchmarks.gpu.figures import Figures, Goal, goals, our_loss
from benchmarks.gpu.results import Result
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.page import mebibytes, milliseconds, page, table

GIB = 2**30
SMALL = (
    "**Measured on a CPU at a small size, to show that every case runs: these figures mean "
    "nothing.**"
)


def whole_page(cases: Sequence[Case], results: Mapping[str, Result], sizes: Sizes) -> str:
    """Return the page, whatever is measured so far."""
    of = Figures(results, sizes)
    sections = [
        *([SMALL] if sizes.device == "cpu" else []),
        "## Goals\n\n" + _goals(goals(of)),
        *(text for part in (_blocks, _attention, _stacks, _steps, _ranks, _tests, _run, _device)
          for text in part(of)),
        *_rest(cases, results),
    ]  # fmt: skip
    return page("One GPU, compared with other implementations", _facts(of, len(cases)), sections)


def summary(results: Mapping[str, Result], sizes: Sizes) -> str:
    """Return the goals that are decided, as a table."""
    return _goals([goal for goal in goals(Figures(results, sizes)) if goal.value is not None])


def _facts(of: Figures, cases: int) -> dict[str, str]:
    """Return the facts of all processes; where they differ, each value once."""
    found: dict[str, str] = {}
    for name in ("date", "machine", "versions", "commit"):
        values = sorted({one.facts[name] for one in of.all if one.facts})
        if values:
            between = " to " if name == "date" else "; "
            shown = values if name != "date" else list(dict.fromkeys([values[0], values[-1]]))
            found[name] = between.join(shown)
    found["command"] = f"python -m benchmarks.gpu all --device {of.sizes.device}"
    found["measured"] = f"{len(of.good)} of {cases} cases"
    return found


def _goals(found: Sequence[Goal]) -> str:
    rows = [
        [
            goal.what, goal.verdict,
            "-" if goal.value is None else f"{goal.value:,.4g}",
            f"{'at least' if goal.at_least else 'at most'} {goal.bound:g}",
        ]
        for goal in found
    ]  # fmt: skip
    return table(["figure", "verdict", "measured", "goal"], rows)


def _blocks(of: Figures) -> Iterator[str]:
    for kind, title, ours in (("loss", "Loss head", our_loss(of.sizes)), ("mlp", "MLP", OURS)):
        if (found := of.one(kind)) is None:
            continue
        blocks = found.figures["blocks"]
        rows = []
        for name, one in blocks.items():
            if one["reason"]:
                rows.append([name, one["reason"], *["-"] * 4])
                continue
            over = [
                "-" if not one[what] or blocks[ours]["reason"] else
                f"{blocks[ours][what] / one[what]:.{digits}f}"
                for what, digits in (("seconds", 3), ("extra_bytes", 4))
            ]  # fmt: skip
            rows.append(
                [
                    name, _spread(one["rounds"]), milliseconds(one["seconds"]),
                    mebibytes(one["extra_bytes"]), *over,
                ]
            )  # fmt: skip
        head = ["block", "rounds, ms", "ms", "extra MiB", "time, ours over", "bytes, ours over"]
        yield (
            f"## {title}\n\n{found.figures['tokens']:,} tokens; ours with tiles of "
            f"{found.figures['tile']:,}, where no other is named. Extra: the peak on top of inputs "
            f"and of what is returned.\n\n{table(head, rows)}"
        )


def _spread(rounds: Sequence[float]) -> str:
    """Return the shortest and the longest of some rounds in milliseconds."""
    return f"{milliseconds(min(rounds))} to {milliseconds(max(rounds))}" if rounds else "-"


def _attention(of: Figures) -> Iterator[str]:
    rows = []
    for found in of.of_kind("attention"):
        flops, rates = found.figures["forward_flops"], of.attention_rates(found)
        where = f"{found.figures['tokens']:,}, D {found.figures['head_dim']}"
        for one in found.figures["blocks"]:
            if one["reason"]:
                rows.append([one["kernel"], one["block"], where, one["reason"], *["-"] * 5])
                continue
            forward, backward, host = (median(one[n]) for n in ("forward", "backward", "host"))
            share = rates.get((one["kernel"], one["block"]))
            rate = f"{3.5 * flops / (forward + backward) / 1e12:.2f}"
            rows.append(
                [
                    one["kernel"], one["block"], where, milliseconds(forward),
                    milliseconds(backward), milliseconds(host),
                    rate if one["block"] == BARE else "-",
                    "-" if share is None else f"{share:.3f}", f"{one['peak_bytes'] / GIB:.3f}",
                ]
            )  # fmt: skip
    if rows:
        head = [
            "kernel", "block", "tokens", "forward ms", "backward ms", "host ms", "TFLOP/s",
            "rate of kernel", "peak GiB",
        ]  # fmt: skip
        ranks = of.sizes.attention.ranks
        yield f"## Attention of one rank of {ranks}\n\n{table(head, rows)}"


def _stacks(of: Figures) -> Iterator[str]:
    rows = []
    for found in of.of_kind("stack"):
        length, ways = found.settings["length"], found.figures["ways"]
        first = next((median(w["rounds"]) for w in ways.values() if not w["reason"]), None)
        for name, way in ways.items():
            if way["reason"]:
                rows.append([name, way["reason"], f"{length:,}", *["-"] * 6])
                continue
            seconds = median(way["rounds"])
            assert first is not None
            rows.append(
                [
                    name, _spread(way["rounds"]), f"{length:,}", f"{seconds:.3f}",
                    f"{length / seconds:,.0f}",
                    f"{found.figures['flops'] / seconds / 1e12:.1f}",
                    f"{way['peak_bytes'] / GIB:.3f}", f"{way['inputs_away']:.2f}",
                    f"{first / seconds:.3f}",
                ]
            )  # fmt: skip
    if not rows:
        return
    head = [
        "stack", "rounds, ms", "tokens", "s", "tokens/s", "model TFLOP/s", "peak GiB",
        "inputs away", "time, the first over",
    ]  # fmt: skip
    text = (
        f"## Steps by stack\n\nForward and backward of {of.sizes.stack_layers} layers of "
        f"{of.sizes.card.name}, without an optimizer, in turn with the stacks of the same group, "
        f"the first of which is compared with the others. `benchmarks.stacks` describes the "
        f"ALST-like stack.\n\n{table(head, rows)}"
    )
    yield "\n\n".join([text, *(f"**{sentence}.**" for sentence in of.disagreements())])


def _steps(of: Figures) -> Iterator[str]:
    rows = []
    for one in of.of_kind("step"):
        figures, told = one.figures, one.figures["predicted"]
        losses = figures["losses"] if "steps" not in one.settings else figures["losses"][-1:]
        notes = "" if figures["finite"] else " (weights not finite)"
        if one.settings["attention"] != "computed":
            notes += f" (attention {one.settings['attention']})"
        rows.append(
            [
                f"{one.settings['card']}, {one.settings['precision']}",
                figures["layout"] + notes, f"{one.settings['length']:,}",
                f"{figures['seconds']:.3f}", f"{figures['tokens_per_second']:,.0f}",
                f"{figures['mfu']:.3f}", f"{figures['peak_bytes'] / GIB:.3f}",
                f"{told['seconds'] / figures['seconds']:.3f}",
                f"{told['peak_bytes'] / figures['peak_bytes']:.3f}",
                ", ".join(f"{loss:.4f}" for loss in losses),
            ]
        )  # fmt: skip
    if rows:
        head = [
            "model", "layout", "tokens", "s", "tokens/s", "causal MFU", "peak GiB",
            "predicted over measured time", "bytes", "losses",
        ]  # fmt: skip
        yield (
            "## Whole training steps\n\nThe recipe's, optimizer included, one sequence a step; the "
            f"median of the steps after the first.\n\n{table(head, rows)}"
        )


def _ranks(of: Figures) -> Iterator[str]:
    rows = []
    for found in of.of_kind("ranks"):
        for name, one in found.figures["layouts"].items():
            if one["reason"]:
                rows.append([name, one["reason"], "-", "-", "-", "-"])
                continue
            away = one.get("away", {"losses": 0.0, "gradient_norms": 0.0})
            rows.append(
                [
                    name, "", f"{one['losses'][-1]:.6f}", f"{one['gradient_norms'][-1]:.5f}",
                    *(f"{away[what]:.1e}" for what in ("losses", "gradient_norms")),
                ]
            )  # fmt: skip
    if rows:
        head = [
            "layout", "note", "last loss", "its gradient norm", "deviation of losses", "of norms",
        ]  # fmt: skip
        yield (
            "## Several ranks on one GPU\n\nThe same weights and tokens under each layout; the "
            f"ranks share one GPU, so times mean nothing.\n\n{table(head, rows)}"
        )


def _tests(of: Figures) -> Iterator[str]:
    for kind, title in (("parity", "Parity in float64 over ranks"), ("kernels", "Kernels")):
        if (found := of.one(kind)) is None:
            continue
        figures = found.figures
        failed = "".join(f"\n* `{name}`: {why}" for name, why in figures["failed"].items())
        yield (
            f"## {title}\n\n{figures['passed']} tests passed, {len(figures['failed'])} failed, "
            f"{figures['skipped']} skipped, in {figures['seconds']:.0f} s"
            f"{'' if figures['complete'] else ', when time ran out'}.\n{failed}".rstrip()
        )


def _run(of: Figures) -> Iterator[str]:
    for kind, title in (("run", "A run from an import to an export"), ("killed", "A rank killed")):
        if (found := of.one(kind)) is None:
            continue
        rows = [
            [name, part["reason"] or _words(part), f"{part['seconds']:.1f}"]
            for name, part in found.figures["parts"].items()
        ]
        yield f"## {title}\n\n{table(['part', 'result', 's'], rows)}"


def _words(part: Mapping[str, Any]) -> str:
    """Return the figures of a part in one line."""
    shown = {name: v for name, v in part.items() if name not in ("reason", "seconds")}
    return "; ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in shown.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_short(one)}" for name, one in value.items())
    return str(value).encode("unicode_escape").decode()  # a generated text has line ends


def _device(of: Figures) -> Iterator[str]:
    rows = []
    for one in of.all:
        if one.gpu:
            shown = ("tflops", "gbps", "free_gib", "least_mhz", "median_mhz", "most_watts")
            figures = [f"{one.gpu[n]:,.5g}" if n in one.gpu else "-" for n in shown]
            rows.append([one.case, one.disturbed, *figures])
    if rows:
        head = [
            "case", "disturbed", "canary TFLOP/s", "GB/s", "free GiB", "least MHz", "median MHz",
            "most W",
        ]  # fmt: skip
        yield (
            "## The device\n\nBefore each case a product and a copy of known size; clocks and "
            f"power during it. No goal counts a disturbed case.\n\n{table(head, rows)}"
        )


def _rest(cases: Sequence[Case], results: Mapping[str, Result]) -> Iterator[str]:
    rows = [
        [case.name, results[case.name].reason or results[case.name].disturbed
         if case.name in results else "not reached"]
        for case in cases
        if case.name not in results or not results[case.name].counts
    ]  # fmt: skip
    if rows:
        yield f"## Not measured\n\n{table(['case', 'reason'], rows)}"
