# SPDX-License-Identifier: Apache-2.0
"""Whether a stage trains the same when its layout changes on the way.

    python -m benchmarks.reliability.layouts

Claim: a stage that is trained under TP 2, then CP 2, PP 2 and DP 2, a quarter each, has at every
step the samples and the learning rate of one that is trained under TP 2 without a stop, and its
loss within 1e-4 relative.

The tiny model is trained in fp32 on two gloo ranks by `longhaul pretrain --layout ...`, which is
interrupted (SIGINT) at the end of each quarter: it saves and ends, and the same command with the
next layout resumes from the checkpoint. Processes that import NeMo are forked from one that has,
as in `benchmarks.reliability.kills`; `--cold` imports it in each.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.reliability.killed_run import COMPARED, Run, warm_start, write_store

MOST = 1e-4
"""Relative difference of a loss that the claim allows."""
LAYOUTS = {"TP 2": "tp2", "CP 2": "ulysses2", "PP 2": "pp2", "DP 2": "dp2"}
OTHERS = "mb2 fp32 cpu"


class Quarter(NamedTuple):
    """The steps that one layout has trained."""

    name: str
    first: int
    last: int

    def row(self, found: dict[int, list[Any]], expected: dict[int, list[Any]]) -> list[str]:
        """Return the row of the table: the largest differences of its steps."""
        steps = range(self.first, self.last + 1)
        differences = [
            max(abs(found[step][at] / expected[step][at] - 1) for step in steps)
            for at, name in enumerate(COMPARED)
            if name in ("loss", "grad_norm", "lr")
        ]
        samples = all(found[step][-1] == expected[step][-1] for step in steps)
        return [
            self.name, "", f"{self.first} to {self.last}", *(f"{each:.1e}" for each in differences),
            "the same" if samples else "OTHERS",
        ]  # fmt: skip

    def holds(self, found: dict[int, list[Any]], expected: dict[int, list[Any]]) -> bool:
        """Whether the claim holds for its steps."""
        loss, lr, samples = (COMPARED.index(name) for name in ("loss", "lr", "samples"))
        return all(
            abs(found[step][loss] / expected[step][loss] - 1) <= MOST
            and found[step][lr] == expected[step][lr]
            and found[step][samples] == expected[step][samples]
            for step in range(self.first, self.last + 1)
        )


def quarters(run: Run, layouts: dict[str, str], steps: int) -> list[Quarter]:
    """Train under each layout in turn; the last one trains to the end."""
    done, taken = list[Quarter](), 0
    for number, (name, words) in enumerate(layouts.items(), 1):
        run.words[run.words.index("--layout") + 1] = f"{words} {OTHERS}"
        run.start()
        if number < len(layouts):
            interrupt_after(run, number * steps // len(layouts))
        else:
            run.finish()
        last = max(run.state().complete)
        if max(run.steps()) != last or last <= taken:
            raise RuntimeError(f"{name} has saved step {last}: {run.last_words()}")
        done.append(Quarter(name, taken + 1, last))
        taken = last
    return done


def interrupt_after(run: Run, step: int) -> None:
    """Interrupt the command once it has logged a step, and wait for its end."""
    while max(run.steps(), default=0) < step:
        if run.has_ended():
            raise RuntimeError(f"the command ended before step {step}: {run.last_words()}")
        time.sleep(0.01)
    assert run.command is not None
    os.kill(run.command.pid, signal.SIGINT)
    run.command.wait()
    if left := run.processes():
        raise RuntimeError(f"{len(left)} processes run on after an interrupt")


def sections(
    done: Sequence[Quarter], found: dict[int, list[Any]], expected: dict[int, list[Any]]
) -> list[str]:
    """Return the table and what it shows."""
    holds = all(quarter.holds(found, expected) for quarter in done)
    head = ["layout", "", "steps", "loss", "gradient norm", "learning rate", "samples"]
    first, last = min(expected), max(expected)
    return [
        f"The tiny model, fp32, 4 sequences of 512 tokens a step, {last} steps. Differences are "
        f"relative to {done[0].name} without a stop, the largest of the steps. The claim "
        f"{'holds' if holds else 'DOES NOT HOLD'}: losses within {MOST:.0e}, rates and samples the "
        "same.",
        table(head, [quarter.row(found, expected) for quarter in done]),
        f"Loss under {done[0].name} alone: {expected[first][0]:.4f} at step {first}, "
        f"{expected[last][0]:.4f} at step {last}.",
    ]


def main() -> None:
    """Train, compare, and write the page; exit with 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--cold", action="store_true", help="import NeMo in every process")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    layouts = {name: LAYOUTS[name] for name in given.layouts}
    with tempfile.TemporaryDirectory(prefix="layouts-") as name, warm_start(given.cold):
        folder = Path(name).resolve()
        store, steps = write_store(folder), given.steps
        # Ranks of tensor parallelism draw their own initial weights, so the first layout is this.
        first = f"{next(iter(layouts.values()))} {OTHERS}"
        plain = Run(folder / "one", store, steps, save_every=steps, layout=first)
        plain.start()
        plain.finish()
        run = Run(folder / "changing", store, steps, save_every=steps)
        done = quarters(run, layouts, steps)
        found, expected = run.steps(), plain.steps()
    text = page(
        "A stage whose layout changes on the way",
        {
            **facts(("nemo-toolkit", "megatron-core")),
            "load over a minute": f"{os.getloadavg()[0]:.1f}",
        },
        sections(done, found, expected),
    )
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)
    sys.exit(0 if all(quarter.holds(found, expected) for quarter in done) else 1)


if __name__ == "__main__":
    main()
