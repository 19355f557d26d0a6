# SPDX-License-Identifier: Apache-2.0
"""Run the checks, each in a process of its own, and write the page.

The parts are imported late: torch reads some variables as it is imported.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import facts
from benchmarks.harness.page import mebibytes, page, table, write
from recipes.shipped.row import Row
from recipes.spec.units import GiB

MOST_SECONDS = 900
"""For one call in a process of its own; a killed process would never answer."""
PACKAGES = ("transformer-engine", "megatron-core", "nemo-toolkit")


def main() -> None:
    """Read the command line, check, write the page; exits with 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Check the CUDA path on a machine without a GPU.",
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run"
    )
    parser.add_argument("--recipes", nargs="+", default=[], metavar="NAME", help="else all")
    parser.add_argument("--processes", type=int, default=2, help="recipes at a time")
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    given = parser.parse_args()
    os.environ |= {
        "TORCH_CUDA_ARCH_LIST": "9.0",  # for the extension that Megatron-Core compiles on import
        "NVTE_DISABLE_NVRTC": "1",
        "TORCH_COMPILE_DISABLE": "1",  # compiling for fake tensors takes most of the time
    }
    _require_cuda_build(given.only)
    begun = time.perf_counter()
    rows = _rows(given.recipes)
    _import_once()
    sections, failed = [], 0
    for part in given.only:
        print(f"{part} ...", flush=True)
        text, errors = PARTS[part](rows, given.processes)
        sections.append(text)
        failed += errors
    minutes = (time.perf_counter() - begun) / 60
    head = facts(PACKAGES) | {"time": f"{minutes:.0f} minutes", "failed": str(failed)}
    write(given.out.resolve(), page("The CUDA path without a GPU", head, sections))
    print(f"{given.out}: {failed} failed, {minutes:.0f} minutes")
    sys.exit(min(failed, 1))


def _require_cuda_build(parts: Sequence[str]) -> None:
    import torch

    if torch.version.cuda is None and set(parts) != {"groups"}:
        sys.exit(
            f"error: torch {torch.__version__} is a build without CUDA, which has no rules for the "
            "shapes of its kernels; `make gpu-check` installs one with it in .pythons/gpu"
        )


def _rows(names: Sequence[str]) -> list[Row]:
    from benchmarks.gpu_check.recipes import gpu_rows

    rows = {row.name: row for row in gpu_rows()}
    if unknown := [name for name in names if name not in rows]:
        sys.exit(f"error: no shipped recipe for GPUs is called {', '.join(unknown)}")
    return [rows[name] for name in names] if names else list(rows.values())


def _import_once() -> None:
    """Import what every process needs, before they are forked."""
    from importlib import import_module

    from benchmarks.gpu_check.recipes import quiet

    quiet()
    for name in ("nemo.collections.llm", "torch._dynamo", "recipes.pretrain"):
        import_module(name)
    try:
        import_module("transformer_engine.pytorch")
    except ImportError as error:
        print(f"Transformer Engine cannot be imported: {error}", file=sys.stderr)


def _forked(function: Callable[..., Any], calls: Iterable[Any], processes: int) -> list[Any]:
    """Call a function in a forked process each: what it patches and sets up ends with that."""
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        found: list[Any] = []
        ended = pool.imap(function, calls, chunksize=1)
        while True:
            try:
                one = ended.next(MOST_SECONDS)
            except StopIteration:
                break
            except multiprocessing.TimeoutError:
                sys.exit(
                    f"error: after {len(found)} calls of {function.__name__} a process was killed, "
                    f"or did not end within {MOST_SECONDS} s"
                )
            found.append(one)
            error = getattr(one, "error", "")
            print(f"  {_name(one)}{': ' + error if error else ''}", flush=True)
        return found


def _name(one: object) -> str:
    parts = (getattr(one, name, "") for name in ("name", "stage", "kind", "world_size"))
    return " ".join(str(part) for part in parts if part) or "all cases"


def _recipes(rows: list[Row], processes: int) -> tuple[str, int]:
    from benchmarks.gpu_check.recipes import constructed, labelled

    found = _forked(constructed, labelled(rows), processes)
    cells = []
    for one in found:
        if one.error:
            cells.append([one.name, one.error, f"{one.ranks:,}", "", "", "", ""])
            continue
        modules = ", ".join(f"{count} {name}" for name, count in sorted(one.modules.items()))
        cells.append([
            one.name, modules or "none", f"{one.ranks:,}", f"{one.parameters / 1e9:.3f}",
            *(_beside(one.held.get(name), each) for name, each in one.planned.items()),
        ])  # fmt: skip
    text = "\n\n".join([
        "## Recipes constructed",
        "One rank's model at full size, wrapped by DDP, with its optimizer. In each cell of bytes: "
        "GiB held, and the ratio to what the planner says. FP8 copies of weights are made in the "
        "first step, and so are the layers that Megatron FSDP gathers, so the planner has more "
        "there.",
        table(
            ["recipe", "Transformer Engine's modules", "ranks", "1e9 weights", "weights",
             "gradients", "fp32 weights"],
            cells,
        ),
    ])  # fmt: skip
    return text, sum(not one.right for one in found)


def _beside(held: int | None, planned: float) -> str:
    if held is None:
        return "not counted"
    return f"{held / GiB:.2f} ({held / planned:.3f})" if planned else f"{held / GiB:.2f}"


def _steps(rows: list[Row], processes: int) -> tuple[str, int]:
    from benchmarks.gpu_check.steps import step

    calls = [(row, last) for row in rows for last in (False, True)[: min(2, row.layout.pp)]]
    found = _forked(step, calls, processes)
    cells = []
    for one in found:
        waits = ", ".join(one.waits) or "none"
        missing = ", ".join(one.without_gradient[:3]) or "all"
        cells.append([one.name, one.stage, one.error or "runs", waits, missing])
    text = "\n\n".join([
        "## Steps on fake tensors",
        "Forward and backward of a micro-batch with two layers a pipeline stage at full width and "
        "length, products and norms of Transformer Engine in Python, FP8 off. Asking for a "
        "value, a blocking copy to the host or synchronizing ends the step, but for what is listed "
        "as a host wait. How many tokens an expert gets is data: each gets as many here.",
        table(["recipe", "stage", "result", "host waits", "weights with a gradient"], cells),
    ])  # fmt: skip
    return text, sum(bool(one.error or one.without_gradient) for one in found)


def _kernels(rows: list[Row], processes: int) -> tuple[str, int]:
    from benchmarks.gpu_check.kernels import all_tried

    found = _forked(_without_argument, [all_tried], 1)[0]
    cases = Counter(one.kernel for one in found)
    good = Counter(one.kernel for one in found if not one.error)
    wrong = [[one.kernel, one.case, one.error] for one in found if one.error]
    text = "\n\n".join([
        "## Attention kernels",
        "bf16, heads of 128, forward and backward from views of [s, b, h, D]: shapes, dtypes and "
        "devices of the output, the log-sum-exp and the gradients.",
        table(["kernel", "cases", "right"], [[n, str(cases[n]), str(good[n])] for n in cases]),
        *([table(["kernel", "case", "error"], wrong)] if wrong else []),
    ])  # fmt: skip
    return text, len(wrong)


def _without_argument(function: Callable[[], Any]) -> Any:
    return function()


def _engine(rows: list[Row], processes: int) -> tuple[str, int]:
    from benchmarks.gpu_check.engine import LIMIT, compared

    found = compared()
    cells = [[one.name, one.error or f"{one.difference:.1e}"] for one in found]
    text = "\n\n".join([
        "## Transformer Engine's modules against the plain spec",
        "Two layers on the CPU in fp32, products and norms in Python: the largest difference of a "
        f"gradient, relative to its largest entry. More than {LIMIT:.0e} is a failure.",
        table(["case", "difference"], cells),
    ])  # fmt: skip
    return text, sum(bool(one.error) or not one.difference <= LIMIT for one in found)


def _groups(rows: list[Row], processes: int) -> tuple[str, int]:
    from benchmarks.gpu_check.groups import KINDS, WORLDS, built

    calls = [(kind, world) for kind in KINDS for world in WORLDS]
    found = _forked(_unpacked, [(built, *call) for call in calls], 1)
    cells = [
        [
            one.kind, f"{one.world_size:,}", f"{one.megatron.groups:,}",
            f"{one.megatron.seconds:.2f}", mebibytes(one.megatron.grown), str(one.ours.groups),
            f"{one.ours.seconds * 1e3:.2f}", mebibytes(one.ours.grown),
        ]
        for one in found
    ]  # fmt: skip
    text = "\n\n".join([
        "## Process groups",
        "Rank 0 on the fake backend, without any message: groups asked for, seconds, and the MiB "
        "by which the process grows; Megatron-Core's, then the inner groups of our context "
        "parallelism, in milliseconds.",
        table(
            ["layout", "ranks", "groups", "s", "MiB", "our groups", "ms", "MiB"],
            cells,
        ),
    ])  # fmt: skip
    return text, 0


def _unpacked(call: tuple[Callable[..., Any], Any, Any]) -> Any:
    function, *arguments = call
    return function(*arguments)


PARTS = {
    "recipes": _recipes,
    "steps": _steps,
    "kernels": _kernels,
    "engine": _engine,
    "groups": _groups,
}
"""Functions of the recipes' rows and of the processes to use; each returns its section of the page,
and how much failed."""

if __name__ == "__main__":
    main()
