# SPDX-License-Identifier: Apache-2.0
"""The planner's wall time with failures compared with a simulation of thousands of runs.

    python -m benchmarks.goodput

Claim: the predicted share of the wall time that trains is within 0.01 of the simulated one, and no
run with half or twice the planned checkpoint interval is shorter beyond the standard error.

The simulation draws the time to each failure from an exponential distribution and follows a job
from checkpoint to checkpoint. Nothing is measured on GPUs.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from recipes.models import CARDS
from recipes.planner.batch_size import even_batch
from recipes.planner.goodput import Failures, Goodput, goodput
from recipes.planner.plan import Plan
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest
from recipes.spec import cluster
from recipes.spec.units import K, M

RUNS = 4_000
WITHIN = 0.01
QUARTERS = 4
"""Checkpoints of a stage by the rule before, whatever its length and nodes."""
CASES = (
    ("llama31_8b", 128 * K, 1_024, 100e9),
    ("llama31_70b", 128 * K, 1_024, 100e9),
    ("llama31_70b", 128 * K, 4_096, 400e9),
    ("llama31_405b", 128 * K, 4_096, 100e9),
    ("llama31_405b", 128 * K, 16_384, 800e9),
)
"""Card, tokens of a sequence, GPUs, tokens of the stage."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stage on many nodes, and the checkpoint interval planned for it."""

    name: str
    plan: Plan
    steps: int

    @property
    def planned(self) -> Goodput:
        """The planned interval and share."""
        return goodput(self.plan, self.steps)

    def simulated(self, every: int, *, runs: int = RUNS) -> tuple[float, float]:
        """Return the share of the wall time that trains, and its standard error."""
        step, segments = self.plan.time.step, max(1, round(self.steps / every))
        walls = wall_times(self.planned.failures, every * step, segments, runs=runs)
        share = segments * every * step / walls.mean()
        return share, share * walls.std(ddof=1) / walls.mean() / np.sqrt(runs)


def wall_times(
    lost: Failures, trained: float, segments: int, *, runs: int = RUNS, seed: int = 0
) -> npt.NDArray[np.float64]:
    """Return the wall times of runs of so many segments, each `trained` seconds and a checkpoint.

    A run that fails goes back to its last complete checkpoint; failures while it starts count,
    failures while it is down don't.
    """
    random = np.random.default_rng(seed)
    wall, left = np.zeros(runs), np.full(runs, segments)
    starting = np.zeros(runs)  # the first start is not part of the model
    length = trained + lost.blocked
    while (going := left > 0).any():
        until_failure = random.exponential(lost.between, runs)
        ends = starting + left * length
        done = going & (until_failure >= ends)
        failed = going & ~done
        wall[done] += ends[done]
        left[done] = 0
        complete = np.floor((until_failure - starting - lost.behind) / length).clip(min=0)
        left[failed] -= np.minimum(complete[failed], left[failed] - 1).astype(int)
        wall[failed] += until_failure[failed] + lost.down
        starting[failed] = lost.restart
    return wall


def cases() -> Iterator[Case]:
    """Yield the cases, each laid out by the planner."""
    machine = cluster.load("dgx_h100")
    for name, length, gpus, tokens in CASES:
        question = SearchRequest(
            card=CARDS[name],
            seq_length=length,
            tokens_per_batch=even_batch(16 * M, length, gpus),
            cluster=machine,
            gpus=gpus,
        )
        found = search(question).plans[0]
        steps = round(tokens / question.tokens_per_batch)
        yield Case(name=f"{name} on {gpus:,} GPUs", plan=found, steps=steps)


def row(case: Case) -> tuple[list[str], bool]:
    """Return the row of a case, and whether the claim holds for it."""
    planned = case.planned
    share, error = case.simulated(planned.every)
    half = case.simulated(max(1, planned.every // 2))
    twice = case.simulated(min(case.steps, planned.every * 2))
    quarter = case.steps / QUARTERS * case.plan.time.step
    quarters = quarter / planned.failures.expected(quarter)  # a simulation would not end
    holds = abs(planned.share - share) <= WITHIN and all(
        other <= share + 3 * (error + wrong) for other, wrong in (half, twice)
    )
    cells = [
        case.name,
        f"{planned.failures.between / 3600:,.1f}",
        f"{planned.saved_bytes / 1e9:,.0f}",
        f"{planned.every} of {case.steps:,}",
        f"{planned.interval / 60:,.1f}",
        f"{planned.share:.1%}",
        f"{share:.1%} ± {error:.1%}",
        f"{half[0]:.1%}",
        f"{twice[0]:.1%}",
        f"{quarters:.2%}",
    ]
    return cells, holds


def whole_page() -> str:
    """Return the page."""
    rows = [row(case) for case in cases()]
    held = sum(holds for _, holds in rows)
    head = [
        "stage", "h between failures", "GB", "every steps", "min", "predicted", "simulated",
        "half", "twice", "quarters",
    ]  # fmt: skip
    known = cluster.load("dgx_h100").reliability
    return page(
        "Wall time with failures, predicted and simulated",
        facts([]),
        [
            f"The claim holds for {held} of {len(rows)} cases, {RUNS:,} runs each. Shares of the "
            f"wall time that trains; a node fails every {known.node_mtbf_hours:,.0f} hours. `half` "
            "and `twice` are the same runs with half and twice the planned checkpoint interval, "
            "`quarters` the formula's share with a checkpoint after each quarter of the stage.",
            table(head, [cells for cells, _ in rows]),
            "Llama 3 405B reported over 90% of effective time on 16,384 GPUs (arXiv 2407.21783).",
        ],
    )


def main() -> None:
    """Print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput",
        description="The planner's wall time with failures compared with a simulation.",
    )
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    text = whole_page()
    if given.out is not None:
        write(given.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
