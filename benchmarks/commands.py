# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of the commands that answer without NeMo, and what each imports.

    python -m benchmarks.commands
    python -m benchmarks.commands --against ../another/checkout

Claim: `--help` takes at most 0.25 s of CPU, the others at most 0.5 s, whole processes, with the
interpreter's own start. With `--against`, the same commands of another checkout run in turn with
this one's, in this environment, and the last column is the ratio of the medians.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.machine import TREE, facts
from benchmarks.harness.page import page, table, write

COMMANDS = {
    ("--help",): 0.25,
    ("recipes",): 0.5,
    ("show", "llama31_8b_nemo_64k"): 0.5,
    ("plan", "llama31_8b", "--seq", "128K"): 0.5,
    ("plan", "llama31_8b", "--seq", "1M", "--nodes", "128"): 0.5,
}
"""Words, and the seconds of CPU that the claim allows."""
RUN = "from longhaul.cli import main; main()"
LIST = """
import sys
from longhaul.cli import main
try:
    main()
finally:
    sys.stderr.write("\\nmodules " + " ".join(sys.modules))
"""


def seconds(tree: Path, words: Sequence[str]) -> float:
    """Return the CPU seconds, user's and system's, of a command of a checkout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(tree, RUN, words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def modules(tree: Path, words: Sequence[str]) -> Counter[str]:
    """Return how many modules of each top-level package are there when a command has ended."""
    said = _run(tree, LIST, words).stderr.rpartition("\nmodules ")[2]
    return Counter(name.partition(".")[0] for name in said.split())


def _run(tree: Path, code: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=True,
    )


def measured(trees: Sequence[Path], rounds: int) -> dict[tuple[str, ...], list[list[float]]]:
    """Return the seconds of each round of each command, by checkout, run in turn."""
    found: dict[tuple[str, ...], list[list[float]]] = {}
    for words in COMMANDS:
        for tree in trees:
            _run(tree, RUN, words)  # compiles what is not compiled yet
        found[words] = [[] for _ in trees]
        for _ in range(rounds):
            for tree, times in zip(trees, found[words], strict=True):
                times.append(seconds(tree, words))
    return found


def _imports(counted: Counter[str]) -> str:
    rooms = ("longhaul", "recipes", "custom_modules", "data", "slurm", "eval")
    others = [name for name in ("typer", "rich", "yaml", "pydantic", "torch") if counted[name]]
    ours = [f"{name} {counted[name]}" for name in rooms if counted[name]]
    return f"{sum(counted.values())}: {', '.join(ours)}; {', '.join(others)}"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout, run in turn with this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    trees = [TREE] if given.against is None else [given.against.resolve(), TREE]
    rows = []
    for words, times in measured(trees, given.rounds).items():
        medians = [statistics.median(of) for of in times]
        ratio = f"{medians[-1] / medians[0]:.2f}" if len(medians) > 1 else "-"
        rows.append(
            [
                f"longhaul {' '.join(words)}",
                _imports(modules(TREE, words)),
                *(f"{median:.2f}" for median in medians),
                f"{COMMANDS[words]:.2f}",
                ratio,
            ]
        )
    names = ["CPU s"] if given.against is None else ["before, CPU s", "CPU s"]
    head = ["command", "modules at its end", *names, "at most", "ratio"]
    text = page("Commands that answer at once", facts(("typer", "rich")), [table(head, rows)])
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
