# SPDX-License-Identifier: Apache-2.0
"""The page of a folder's results: goals first, then a table a kind, then what was not measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.cases import USUAL_CONNECTIONS, Case
from benchmarks.gpu.figures import BARE, Figures, goals, ratio
from benchmarks.gpu.results import Result
from benchmarks.gpu.sizes import Sizes, machine
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
        _goals(of),
        *(text for part in (_host, _blocks, _attention, _stacks, _longest, _steps, _run)
          for text in part(of)),
        *_rest(cases, results),
    ]  # fmt: skip
    return page("One GPU, compared with other implementations", _facts(of, len(cases)), sections)


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


def _goals(of: Figures) -> str:
    rows = [
        [
            goal.what, goal.verdict,
            "-" if goal.value is None else f"{goal.value:,.4g}",
            f"{'at least' if goal.at_least else 'at most'} {goal.bound:g}",
        ]
        for goal in goals(of)
    ]  # fmt: skip
    return "\n\n".join(["## Goals", table(["figure", "verdict", "measured", "goal"], rows)])


def _host(of: Figures) -> Iterator[str]:
    if (copies := of.one("copies")) is not None:
        rates = copies.figures["gbps"]
        yield (
            f"## Host memory\n\nPinned copies of {mebibytes(copies.figures['bytes'])} MiB: "
            f"{rates['out']:.1f} GB/s out, {rates['back']:.1f} GB/s back."
        )
    if (fork := of.one("fork")) is not None:
        rows = [
            [name, "", f"{one['seconds'] * 1e3:.1f}", mebibytes(one["child_bytes"])]
            for name, one in fork.figures["held"].items()
        ]
        head = ["held while forking", "", "ms", "MiB of the child's own"]
        size = mebibytes(fork.figures["bytes"])
        yield f"A fork while {size} MiB are held:\n\n{table(head, rows)}"


def _blocks(of: Figures) -> Iterator[str]:
    for kind, title in (("loss", "Loss head"), ("mlp", "MLP")):
        found = of.one(kind)
        if found is None:
            continue
        blocks = found.figures["blocks"]
        ours = blocks["ours"]
        rows = []
        for name, one in blocks.items():
            if one["reason"]:
                rows.append([name, one["reason"], *["-"] * 4])
                continue
            rows.append(
                [
                    name, "", milliseconds(one["seconds"]), mebibytes(one["extra_bytes"]),
                    _times(ratio(ours["seconds"], one["seconds"])),
                    _times(ratio(ours["extra_bytes"], one["extra_bytes"]), 4),
                ]
            )  # fmt: skip
        head = ["block", "note", "ms", "extra MiB", "time, ours over", "bytes, ours over"]
        yield (
            f"## {title}\n\n{found.figures['tokens']:,} tokens, tiles of "
            f"{found.figures['tile']:,}; extra: the peak on top of inputs and of what is "
            f"returned.\n\n{table(head, rows)}"
        )


def _attention(of: Figures) -> Iterator[str]:
    rows = []
    for found in of.of_kind("attention"):
        flops = found.figures["forward_flops"]
        bare: dict[str, float] = {}
        for one in found.figures["blocks"]:
            if one["reason"]:
                rows.append([one["kernel"], one["block"], one["reason"], *["-"] * 5])
                continue
            both = one["forward"] + one["backward"]
            if one["block"] == BARE:
                bare[one["kernel"]] = both
            rows.append(
                [
                    one["kernel"], one["block"], f"{found.figures['tokens']:,}",
                    milliseconds(one["forward"]), milliseconds(one["backward"]),
                    f"{3.5 * flops / both / 1e12:.2f}",
                    _times(ratio(bare.get(one["kernel"]), both)),
                    f"{one['peak_bytes'] / GIB:.3f}",
                ]
            )  # fmt: skip
    if rows:
        head = [
            "kernel", "block", "tokens", "forward ms", "backward ms", "TFLOP/s", "rate of bare",
            "peak GiB",
        ]  # fmt: skip
        ranks = of.sizes.attention.ranks
        yield f"## Attention of one rank of {ranks}\n\n{table(head, rows)}"


def _stacks(of: Figures) -> Iterator[str]:
    keys = dict.fromkeys(
        (one.settings["length"], one.settings["way"], one.connections)
        for one in of.of_kind("stack")
    )
    peak = machine_peak(of)
    rows = []
    for length, way, connections in sorted(keys, key=lambda key: (key[0], key[2] != "1")):
        rounds = of.stacks(length, way, connections)
        seconds = of.stack(length, way, "seconds", connections)
        ours = of.stack(length, "ours", "seconds", connections)
        first = rounds[0].figures
        assert seconds is not None
        spread = [one.figures["seconds"] for one in rounds]
        queues = "" if connections == USUAL_CONNECTIONS else f", {connections} connections"
        rows.append(
            [
                way + queues, f"{length:,}", f"{seconds:.3f}",
                f"{min(spread):.3f} to {max(spread):.3f}" if len(spread) > 1 else "-",
                f"{length / seconds:,.0f}", f"{first['flops'] / seconds / peak:.3f}",
                f"{first['peak_bytes'] / GIB:.3f}", f"{first['inputs_away']:.2f}",
                _times(ratio(ours, seconds)),
            ]
        )  # fmt: skip
    if not rows:
        return
    head = [
        "stack", "tokens", "s", "rounds", "tokens/s", "causal MFU", "peak GiB", "inputs away",
        "time, ours over",
    ]  # fmt: skip
    card = of.sizes.of_layers(of.sizes.layers[0])
    text = (
        f"## Steps by stack\n\nForward and backward of {card.name}, without an optimizer; "
        f"`benchmarks.stacks` describes the ALST-like stack. {_slopes(of)}\n\n{table(head, rows)}"
    )
    wrong = of.disagreements()
    yield "\n\n".join([text, *(f"**{sentence}.**" for sentence in wrong)])


def machine_peak(of: Figures) -> float:
    """Return the device's FLOP/s in bf16, by the name that results state; else an H100's."""
    named = next((one.facts["machine"] for one in of.good if one.facts), "unknown")
    return machine(of.sizes.device, named).gpu.bf16_tflops * 1e12


def _slopes(of: Figures) -> str:
    found = {way: slope for way in ("ours", "ALST-like") if (slope := of.slope(way)) is not None}
    if not found:
        return ""
    said = ", ".join(f"{slope:,.0f} ({way})" for way, slope in found.items())
    return f"Bytes that a token adds to the peak: {said}."


def _longest(of: Figures) -> Iterator[str]:
    rows = [
        [
            one.settings["way"], one.figures["reason"] or "the longest that was tried",
            f"{one.figures['tokens']:,}",
            f"{one.figures['too_long']:,}" if one.figures["too_long"] else "-",
        ]
        for one in of.of_kind("longest")
    ]  # fmt: skip
    if rows:
        head = ["stack", "then", "longest that fits", "that does not"]
        yield (
            "## The longest step that fits\n\nThe products of attention left out, which take the "
            f"time and no memory of their own.\n\n{table(head, rows)}"
        )


def _steps(of: Figures) -> Iterator[str]:
    rows = []
    for one in of.of_kind("step"):
        figures, told = one.figures, one.figures["predicted"]
        finite = "" if figures["finite"] else " (weights not finite)"
        rows.append(
            [
                f"{one.settings['card']}, {one.settings['precision']}",
                figures["layout"] + finite, f"{one.settings['length']:,}",
                f"{figures['seconds']:.3f}", f"{figures['tokens_per_second']:,.0f}",
                f"{figures['mfu']:.3f}", f"{figures['peak_bytes'] / GIB:.3f}",
                _times(told["seconds"] / figures["seconds"]),
                _times(told["peak_bytes"] / figures["peak_bytes"]),
            ]
        )  # fmt: skip
    if rows:
        head = [
            "model", "layout", "tokens", "s", "tokens/s", "causal MFU", "peak GiB",
            "predicted over measured time", "bytes",
        ]  # fmt: skip
        yield (
            "## Whole training steps\n\nThe recipe's, optimizer included, one sequence a step."
            f"\n\n{table(head, rows)}"
        )


def _run(of: Figures) -> Iterator[str]:
    found = of.one("run")
    if found is None:
        return
    figures = found.figures
    yield (
        f"## A run that offloads, validates and saves\n\n{figures['tokens']:,} tokens a step; "
        f"seconds by step {', '.join(f'{s:.2f}' for s in figures['step_seconds'])}: usually "
        f"{figures['usual_seconds']:.2f}, {figures['after_saving_seconds']:.2f} in the step after "
        f"validation and save. Validation losses by step: {_by_step(figures)}. Newest checkpoint: "
        f"`{figures['checkpoint']}`."
    )


def _by_step(figures: Mapping[str, Any]) -> str:
    losses = figures["validation_losses"].items()
    return ", ".join(f"{step}: {loss:.3f}" for step, loss in losses) or "none"


def _rest(cases: Sequence[Case], results: Mapping[str, Result]) -> Iterator[str]:
    rows = [
        [case.name, results[case.name].reason if case.name in results else "not reached"]
        for case in cases
        if case.name not in results or results[case.name].reason
    ]
    if rows:
        yield f"## Not measured\n\n{table(['case', 'reason'], rows)}"


def _times(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
