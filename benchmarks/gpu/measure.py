# SPDX-License-Identifier: Apache-2.0
"""A case's measurement, and the process that runs some of them in order."""

import gc
import json
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu import attention, blocks, host, stacked, steps, whole_run
from benchmarks.gpu.cases import Case
from benchmarks.gpu.results import Result, Results
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.machine import facts
from benchmarks.harness.out_of_memory import OUT_OF_MEMORY, out_of_memory

PACKAGES = (
    "megatron-core", "nemo-toolkit", "triton", "flash-attn", "transformer-engine", "deepspeed",
    "liger-kernel", "cut-cross-entropy",
)  # fmt: skip
MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "copies": host.copies,
    "fork": host.fork,
    "loss": blocks.loss,
    "mlp": blocks.mlp,
    "attention": attention.attention,
    "stack": stacked.stack,
    "step": steps.step,
    "longest": stacked.longest,
    "run": whole_run.run,
}
MOST_WORDS = 400
"""Of a reason: an error of CUDA can be pages long."""


def measure(
    cases: Sequence[Case], sizes: Sizes, results: Results, *, until: float, peak: float
) -> None:
    """Run cases in order and write a file for each; leave out those too long for the time left.

    `until` is a moment of `time.time`, `peak` the device's TFLOP/s, for estimates. A case that
    fails leaves its reason; one that ends the process leaves its mark. One that runs out of memory
    is the last: what it held may stay with the process, and the next would fail for it.
    """
    of_run = facts(PACKAGES)
    for case in cases:
        if time.time() + case.seconds(peak) > until:
            continue
        with results.begun(case):
            found = _result(case, sizes)
            found.facts = of_run
            results.write(found)
        print(f"{case.name}: {found.reason or 'measured'}, {found.seconds:.0f} s", flush=True)
        if OUT_OF_MEMORY in found.reason + json.dumps(found.figures):
            return


def _result(case: Case, sizes: Sizes) -> Result:
    torch.manual_seed(0)
    start = time.perf_counter()
    figures: dict[str, Any] = {}
    reason = ""
    try:
        figures = MEASUREMENTS[case.kind](sizes, **case.settings)
    except torch.OutOfMemoryError as raised:
        reason = out_of_memory(raised)
    except Exception as raised:  # a peer may raise anything; its reason goes into the file
        traceback.print_exc()
        reason = f"{type(raised).__name__}: {raised}".splitlines()[0][:MOST_WORDS]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    return Result.of(case, sizes.device, figures=figures, reason=reason, seconds=seconds)
