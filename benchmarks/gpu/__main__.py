# SPDX-License-Identifier: Apache-2.0
"""Run cases, list them, or write their page again.

This process must not reach the device, whose memory is measured: only those that it starts do.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.cases import Case, all_cases
from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import SIZES, machine
from data.cuda_extension import prepare_process

PAGE = "page.md"


def main() -> None:
    """Read the command line and do what it says."""
    given = _arguments()
    cases = all_cases(SIZES[given.device])
    if given.action == "cases":
        for case in cases:
            print(f"{case.seconds(machine('cpu').gpu.bf16_tflops):6.0f} s  {case.name}")
        return
    if given.action == "machine":
        from benchmarks.harness.machine import facts

        print(facts()["machine"])
        return
    results = Results(given.out.resolve())
    if given.action == "worker":
        _work(given, cases, results)
    elif given.action == "page":
        _write_page(given, cases, results)
    else:
        _run(given, cases, results)


def _run(given: argparse.Namespace, cases: Sequence[Case], results: Results) -> None:
    from benchmarks.gpu import session

    name = session.name_of_machine()
    try:
        there = results.read()
        session.require_same_machine(there, name, given.device)
    except ValueError as error:
        sys.exit(f"error: {error}")
    peak = machine(given.device, name).gpu.bf16_tflops
    chosen = [case for case in cases if given.action in ("all", case.kind)]
    if given.again:
        names = {case.name for case in chosen}
        results.forget({name for name, one in there.items() if one.reason and name in names})
    try:
        session.run(chosen, results, given.device, minutes=given.minutes, peak=peak)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    finally:
        _write_page(given, cases, results)


def _write_page(given: argparse.Namespace, cases: Sequence[Case], results: Results) -> None:
    from benchmarks.gpu import report
    from benchmarks.harness.page import write

    found = results.read()
    path = results.folder / PAGE
    write(path, report.whole_page(cases, found, SIZES[given.device]))
    measured = sum(not one.reason for one in found.values())
    print(f"{path}: {measured} of {len(cases)} cases measured", end="")
    failed = len(found) - measured
    print(f", {failed} with a reason instead" if failed else "")
    if len(found) < len(cases) and given.action == "all":
        print(f"{len(cases) - len(found)} are left; the same command continues with them")


def _work(given: argparse.Namespace, cases: Sequence[Case], results: Results) -> None:
    prepare_process()  # before Megatron-Core is imported
    from benchmarks.gpu.measure import measure

    named = [case for case in cases if case.name in given.cases]
    measure(named, SIZES[given.device], results, until=given.until, peak=given.peak)


def _arguments() -> argparse.Namespace:
    kinds = list(dict.fromkeys(case.kind for case in all_cases(SIZES["cuda"])))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Measure the claims about one GPU and compare them with other implementations.",
        epilog="all: every case; cases: list them; page: write the page again; the other words "
        "run the cases of one kind.",
    )
    parser.add_argument(
        "action", choices=["all", *kinds, "cases", "page", "worker", "machine"], metavar="WHAT",
        help=f"all, {', '.join(kinds)}, cases or page",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="for the cases of this call")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument("--again", action="store_true", help="run the cases that failed once more")
    worker = parser.add_argument_group("of the processes that `all` starts")
    worker.add_argument("--cases", nargs="*", default=[])
    worker.add_argument("--until", type=float, default=0.0)
    worker.add_argument("--peak", type=float, default=0.0)
    given = parser.parse_args()
    if given.minutes <= 0:
        parser.error(f"--minutes {given.minutes:g}; it must be above 0")
    if (
        given.action not in ("cases", "page", "machine")
        and given.device == "cuda"
        and not _has_cuda()
    ):
        parser.error(
            "--device cuda: PyTorch finds no GPU here; `--device cpu` runs every case at a small "
            "size, whose figures mean nothing"
        )
    return given


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
