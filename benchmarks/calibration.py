# SPDX-License-Identifier: Apache-2.0
"""A calibration on two CPU ranks, and the step that it predicts at a length it has not seen.

    python -m benchmarks.calibration --out PAGE

Claim: after `longhaul calibrate` on a node and on stages of 1K, 2K and 4K tokens, the predicted
step at 8K is within 15% of the measured one.

The commands are those of docs/planner.md, with the tiny card, a ladder and a cluster file of its
own. The file's peaks are made up: only their products with the shares matter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from eval.run_folder import read_steps
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.naming import length_from
from recipes.spec.units import K

SEEN, UNSEEN = ("1K", "2K", "4K"), "8K"
WITHIN, WARM_UP = 0.15, 2
WORDS, BATCH = "ulysses2 cpu", 8 * K
CLUSTER = """\
hardware:
  gpu: {name: a core, memory_gib: 8, bf16_tflops: 0.1, fp8_tflops: 0, memory_gbps: 20,
        capability: [9, 0]}
  gpus_per_node: 2
  host_memory_gib: 16
  nvlink_gbps: 5
  network_gbps: 1
  host_link_gbps: 10
executor: local
"""


def ladder(steps: int) -> str:
    """Return a ladder file with a stage for each length."""
    stages = [
        f"  - {{seq_length: {length}, rope: {{method: default, base: {10_000 * 2**place}}}, "
        f"tokens: {steps * BATCH}, tokens_per_batch: {BATCH}, lr: {{peak: 1.0e-3}}, "
        f"documents: across{', start: scratch' if not place else ''}}}"
        for place, length in enumerate((*SEEN, UNSEEN))
    ]
    return "\n".join(["name: measured", "source: own", "stages:", *stages, ""])


def run(folder: Path, *words: str) -> str:
    """Return the output of a `longhaul` command in a folder; a failure ends the benchmark."""
    code = "from longhaul.cli import main; main()"
    tree = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": tree},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"error: longhaul {' '.join(words)}: {done.stderr.strip()[-600:]}")
    return done.stdout


def train(folder: Path, length: str) -> float:
    """Train a stage and return the median seconds of its steps."""
    run(
        folder, "pretrain", "--card", "tiny", "--ladder", "ladder.yaml", "--stage", length,
        "--store", "store", "--layout", WORDS,
    )  # fmt: skip
    (metrics,) = folder.glob(f"runs/*/stages/*_{length.lower()}/metrics.jsonl")
    return median(step.seconds for step in read_steps(metrics)[WARM_UP:])


def predicted(folder: Path, length: str) -> float:
    """Return the predicted seconds of a step with the cluster file as it is."""
    workload = Workload(
        card=CARDS["tiny"], seq_length=length_from(length), tokens_per_batch=BATCH,
        layout=layout_from(f"{WORDS} fp32"), gpus_per_node=2,
    )  # fmt: skip
    return time(workload, cluster.load(str(folder / "cluster.yaml"))).step


def measured(folder: Path, steps: int) -> tuple[list[list[str]], bool, str]:
    """Return the rows of the table, whether the claim holds, and the node's rates in words."""
    (folder / "ladder.yaml").write_text(ladder(steps))
    (folder / "cluster.yaml").write_text(CLUSTER)
    run(folder, "prepare", "--vocab-size", "512", "--out", "store")
    before = {length: predicted(folder, length) for length in (*SEEN, UNSEEN)}
    node = json.loads(
        run(folder, "calibrate", "--cluster", "cluster.yaml", "--device", "cpu", "--json")
    )
    of_node = {length: predicted(folder, length) for length in (*SEEN, UNSEEN)}
    seconds = {length: train(folder, length) for length in SEEN}
    (trained,) = folder.glob("runs/*")
    run(
        folder, "calibrate", "--cluster", "cluster.yaml", "--run", str(trained), "--card", "tiny",
        "--json",
    )  # fmt: skip
    fitted = {length: predicted(folder, length) for length in (*SEEN, UNSEEN)}
    seconds[UNSEEN] = train(folder, UNSEEN)
    rows = [
        [
            length, "seen" if length in SEEN else "not seen", f"{took:.3f}",
            *(f"{each[length] / took:.2f}" for each in (before, of_node, fitted)),
        ]
        for length, took in seconds.items()
    ]  # fmt: skip
    rates = ", ".join(
        f"{name} {rate / 1e9:,.3g} GFLOP/s" if "memory" not in name and "exchange" not in name
        else f"{name} {rate / 1e9:,.3g} GB/s"
        for name, rate in node["rates_per_second"].items()
    )  # fmt: skip
    return rows, abs(fitted[UNSEEN] / seconds[UNSEEN] - 1) <= WITHIN, rates


def main() -> None:
    """Measure, print the page and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", description="A calibration on two CPU ranks."
    )
    parser.add_argument("--steps", type=int, default=16, help="steps of each stage")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, holds, rates = measured(Path(folder), given.steps)
    text = page(
        "The planner calibrated on two CPU ranks",
        facts([]),
        [
            f"The claim {'holds' if holds else 'does not hold'}. Predicted over measured seconds "
            f"of a step of the tiny card, {BATCH:,} tokens, Ulysses on two ranks: with the shares "
            "of a GPU and made-up peaks, after the measurement of the node, and after the fit to "
            f"the seen lengths ({given.steps} steps each).",
            table(["length", "in the fit", "s", "before", "node", "fit"], rows),
            f"The node: {rates}.",
        ],
    )
    if given.out is not None:
        write(given.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
