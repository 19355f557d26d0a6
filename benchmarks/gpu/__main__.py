# SPDX-License-Identifier: Apache-2.0
"""Run a list of cases, name them, or write their page again.

This process must not reach the device, whose memory is measured: only those that it starts do.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, all_cases
from benchmarks.gpu.results import MEASURED, Results, folder_of, kept
from benchmarks.gpu.sizes import SIZES, machine
from data.cuda_extension import prepare_process
from data.files.whole import write_text

PAGE, RENTAL = "page.md", "rental.json"
CALLS = ("first", "second", "third")
NO_GPU = (
    "--device cuda: PyTorch finds no GPU here; `--device cpu` runs every case at a small size, "
    "whose figures mean nothing"
)


def main() -> None:
    """Read the command line and do what it says."""
    began = time.time()
    given = _arguments()
    cases = all_cases(SIZES[given.device])
    if given.action == "cases":
        for case in cases:
            print(f"{case.call:6} {case.seconds:4.0f} s  {case.name}")
    elif given.action == "machine":
        print(json.dumps(_machine(given)))
    elif given.action == "worker":
        _work(given, cases)
    elif given.action == "page":
        _write_page(given, cases, Results(given.out.resolve()))
    else:
        _run(given, cases, until=began + given.seconds)


def _run(given: argparse.Namespace, cases: Sequence[Case], *, until: float) -> None:
    from benchmarks.gpu import session

    # The end of the time from outside: without it the worker, a session of its own, would live on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended from outside"))
    rental = (given.rental or given.out / RENTAL).resolve()
    chosen = [case for case in cases if given.action in ("all", case.call, case.kind)]
    try:
        here = session.facts_of_machine(given.device, rental)
        if here["fault"]:
            raise ValueError(here["fault"])
        results = Results(given.out.resolve())
        there = results.read()
        if given.again:
            names = {case.name for case in chosen}
            results.forget({n for n, one in there.items() if not one.counts and n in names})
            there = results.read()
        before = kept(MEASURED / folder_of(here["machine"])) if given.missing else {}
        done = {*there, *(name for name, one in before.items() if one.counts)}
        left = [case for case in chosen if case.name not in done]
        if not left:
            print(f"all {len(chosen)} cases are measured already")
            return
        peak = machine(given.device, here["machine"]).gpu.bf16_tflops
        needed = session.shortest(left, given.device, peak)
        if time.time() + needed > until:
            raise ValueError(
                f"{max(0, until - time.time()):.0f} s are left, and the first result takes "
                f"{needed:.0f}; give more --seconds"
            )
        session.run(left, results, given.device, rental, until=until, peak=peak)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    _write_page(given, cases, results)


def _write_page(given: argparse.Namespace, cases: Sequence[Case], results: Results) -> None:
    from benchmarks.gpu import report
    from benchmarks.harness.page import write

    found = results.read()
    path = results.folder / PAGE
    write(path, report.whole_page(cases, found, SIZES[given.device]))
    print(report.summary(found, SIZES[given.device]))
    counted = sum(one.counts for one in found.values())
    disturbed = sum(bool(one.disturbed) for one in found.values())
    failed = sum(bool(one.reason) for one in found.values())
    print(f"{path}: {counted} of {len(cases)} cases measured, {disturbed} disturbed, {failed} with "
          "a reason instead")  # fmt: skip


def _machine(given: argparse.Namespace) -> dict[str, Any]:
    """Return the machine's name, what is in the way, and the rental that it is held for."""
    import torch

    from benchmarks.gpu.guards import Sensors, canary, refusal
    from benchmarks.harness.machine import facts

    device = torch.device(given.device)
    sensors = Sensors(device)  # before this process can be among those that NVML lists
    if given.device == "cuda" and not torch.cuda.is_available():
        return {"fault": NO_GPU}
    fault = refusal(device, sensors)
    name = facts()["machine"]
    found: dict[str, Any] = {"machine": name, "fault": fault}
    if given.rental.exists():
        known = json.loads(given.rental.read_text())["machine"]
        if known != name:
            found["fault"] = (
                f"{given.rental} is of another machine ({known}); this one is {name}: take "
                "another --out"
            )
    elif not fault:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        first = asdict(canary(device))
        given.rental.parent.mkdir(parents=True, exist_ok=True)
        rental = {"id": f"{folder_of(name)} {now}", "machine": name, "canary": first}
        write_text(given.rental, json.dumps(rental) + "\n")
    return found


def _work(given: argparse.Namespace, cases: Sequence[Case]) -> None:
    prepare_process()  # before Megatron-Core is imported
    import torch

    from benchmarks.gpu.guards import LEAST, Canary, Guard
    from benchmarks.gpu.measure import Session, measure

    rental = json.loads(given.rental.read_text())
    torch.zeros(1, device=given.device)  # now this process is among those that NVML lists
    session = Session(
        sizes=SIZES[given.device], results=Results(given.out), rental=rental["id"],
        guard=Guard(
            torch.device(given.device), Canary(**rental["canary"]),
            least=LEAST if given.device == "cuda" else 0.0,  # figures of a CPU mean nothing
        ),
        until=given.until, peak=given.peak,
    )  # fmt: skip
    measure([case for case in cases if case.name in given.cases], session)


def _arguments() -> argparse.Namespace:
    kinds = sorted({case.kind for case in all_cases(SIZES["cuda"])})
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Measure the claims about one GPU and compare them with other implementations.",
        epilog="first, second, third: the lists of cases; all: the three in order; cases: name "
        "them; page: write the page again; the other words run the cases of one kind.",
    )
    words = ["all", *CALLS, *kinds, "cases", "page", "worker", "machine"]
    parser.add_argument(
        "action", choices=words, metavar="WHAT",
        help=f"all, {', '.join([*CALLS, *kinds])}, cases or page",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for all of this call")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument("--again", action="store_true", help="run failed and disturbed cases again")
    parser.add_argument(
        "--missing", action="store_true", help="leave out what benchmarks/gpu/measured has"
    )
    parser.add_argument("--rental", type=Path, help="file of the first canary [OUT/rental.json]")
    worker = parser.add_argument_group("of the processes that a list starts")
    worker.add_argument("--cases", nargs="*", default=[])
    worker.add_argument("--until", type=float, default=0.0)
    worker.add_argument("--peak", type=float, default=0.0)
    given = parser.parse_args()
    if given.seconds <= 0:
        parser.error(f"--seconds {given.seconds:g}; it must be above 0")
    return given


if __name__ == "__main__":
    main()
