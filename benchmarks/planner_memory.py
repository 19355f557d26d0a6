# SPDX-License-Identifier: Apache-2.0
"""The planner's activation bytes beside those counted in a step of the real recipe, on CPU.

    python -m benchmarks.planner_memory

Claim: the planner's bytes are within 5% of the counted ones, for every way to recompute, tile and
offload and every kind of parallelism.

The models, fp32: the tiny card, and a Llama-3.1-8B, a Qwen3-8B, which has norms on queries and
keys, and three whose layers differ (SmolLM3, Olmo 3, Gemma 3), with their widths and vocabularies
divided by 16 and 4 layers, or as many as from one full layer to the next. Each step is that of the
recipe, as NeMo builds it, on 1, 2 and 4 gloo ranks (`benchmarks.planner_cases`); steps that a
recipe of the model refuses are left out. Bytes are live tensor bytes by category
(`custom_modules.profiling.step_memory`), of the rank that holds most. Weights, gradients and
optimizer are left out of both sides, so that a wrong formula for activations cannot hide behind
them. The planner is asked for plain PyTorch operators (`PLAIN`); what fused kernels of a GPU keep
is another column of the same formulas and not measured here.

On two idle cores all of it takes some 25 minutes, most of it attention and the counting.
"""

import argparse
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness.machine import facts
from benchmarks.harness.page import mebibytes, page, table, write
from benchmarks.harness.ranks import on_ranks
from benchmarks.planner_cases import (
    CARDS,
    TILE,
    Case,
    Found,
    four_ranks,
    fullest,
    measured,
    one_rank,
    predicted,
    two_ranks,
)
from recipes.constraints.violations import violations
from recipes.planner.feasibility import training_step

BOUND = 0.05
"""Of the measured bytes, that the claim allows."""
AT_ONCE = 8
"""Steps that the same processes run: gloo's threads outlive each step's groups."""
CASES: dict[int, Callable[[str, int], Iterator[Case]]] = {1: one_rank, 2: two_ranks, 4: four_ranks}
Pair = tuple[Case, Found]


def on_this_rank(cases: Sequence[Case]) -> list[Found]:
    """Measure on this rank, without NeMo's notes on each model."""
    logging.disable(logging.WARNING)
    return measured(cases)


def refused(case: Case) -> str:
    """Return why a recipe of the case is refused, such as a pipeline that cuts the pattern."""
    return next(violations(training_step(case.workload, ranks_per_node=8)), "")


def ratio(case: Case, found: Found) -> float:
    """Return predicted over measured bytes."""
    return predicted(case).activations / found.activations


def verdict(pairs: Sequence[Pair]) -> str:
    """Return the widest ratios, and whether the claim holds."""
    ratios = sorted(ratio(*pair) for pair in pairs)
    outside = [pair for pair in pairs if abs(ratio(*pair) - 1) > BOUND]
    said = f"{len(pairs)} steps, predicted over measured {ratios[0]:.3f} to {ratios[-1]:.3f}; "
    if not outside:
        return said + f"all within {BOUND:.0%}."
    names = ", ".join(f"{case.card} {case.name}" for case, _ in outside)
    return said + f"{len(outside)} further off than {BOUND:.0%}: {names}."


def section(card: str, pairs: Sequence[Pair]) -> str:
    """Return the table of one model."""
    rows = []
    for case, found in pairs:
        plan = predicted(case)
        rows.append(
            [
                case.name, found.peak_in, plan.peak_in, f"{case.tokens:,}",
                mebibytes(found.activations), mebibytes(plan.activations),
                f"{ratio(case, found):.3f}",
            ]
        )  # fmt: skip
    head = [
        "step", "measured peak in", "predicted", "tokens a rank", "measured MiB", "predicted MiB",
        "ratio",
    ]  # fmt: skip
    shape = CARDS[card]
    told = (
        f"{shape.layers} layers of {shape.hidden}, FFN {shape.ffn_hidden}, {shape.heads} heads and "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, vocabulary {shape.vocab:,}"
    )
    return f"## {card}\n\n{told}.\n\n{table(head, rows)}"


def of_left_out(reasons: Sequence[str]) -> str:
    """Return how many steps a recipe of the model refuses, and why; empty without any."""
    if not reasons:
        return ""
    listed = "\n".join(f"* {count}: {why}" for why, count in Counter(reasons).most_common())
    return f"{len(reasons)} further steps are left out, since a recipe refuses them:\n\n{listed}"


def whole_page(pairs: Sequence[Pair], reasons: Sequence[str], load: str) -> str:
    """Return the page; `reasons` are those of the steps that are left out."""
    cards = dict.fromkeys(case.card for case, _ in pairs)
    return page(
        "Activation bytes, predicted and measured",
        facts(["megatron-core", "nemo-toolkit"]) | {"load": load},
        [
            f"fp32, gloo ranks, tiles of {TILE} tokens; bytes of the rank that holds most, without "
            "weights, gradients and optimizer. `away` is on the host.",
            verdict(pairs),
            *filter(None, [of_left_out(reasons)]),
            *(section(card, [pair for pair in pairs if pair[0].card == card]) for card in cards),
        ],
    )


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_memory",
        description="Activation bytes of a training step, predicted and measured, on CPU.",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank, times ranks")
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--ranks", type=int, nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for some steps")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    load = os.getloadavg()[0]

    def busy() -> str:
        return f"{load:.1f} running at the start, {os.getloadavg()[0]:.1f} at the end"

    pairs: list[Pair] = []
    left_out: list[str] = []
    for card, ranks in itertools.product(given.cards, given.ranks):
        made = CASES[ranks](card, given.tokens // ranks)
        asked = [(case, refused(case)) for case in made if given.only in case.name]
        left_out += [why for _, why in asked if why]
        cases = [case for case, why in asked if not why]
        if not cases:
            continue
        for first in range(0, len(cases), AT_ONCE):
            some = cases[first : first + AT_ONCE]
            found = on_ranks(ranks, on_this_rank, some, timeout_seconds=given.timeout)
            pairs += zip(some, fullest([found[rank] for rank in sorted(found)]), strict=True)
            if given.out is not None:  # what is measured so far
                write(given.out, whole_page(pairs, left_out, busy()))
    if not pairs:
        parser.error(
            f"no case on {given.ranks} ranks that the models' recipes take has {given.only!r} in "
            "its name"
        )
    text = whole_page(pairs, left_out, busy())
    if given.out is not None:
        write(given.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
