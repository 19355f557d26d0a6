# SPDX-License-Identifier: Apache-2.0
"""Run the commands of docs/real_model.md in order, and record the time of each.

    python -m examples.real_model.steps

A block of the page is a step if the line before it names what the step makes. A step whose result
is there is not run again, so an interrupted run resumes by the same command. The times, with those
of interrupted attempts, are in `runs/smollm2_135m_yarn_16k/times.json`.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
PAGE = TREE / "docs" / "real_model.md"
RUN = Path("runs/smollm2_135m_yarn_16k")
TIMES = RUN / "times.json"
STEP = re.compile(
    r"^<!-- not run: step `(?P<name>[^`]+)` of make real(?:, makes (?P<result>\S+))? -->\n"
    r"```sh\n(?P<commands>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """Commands of the page, and the file that is there once they have ended."""

    name: str
    commands: str
    result: str | None


@dataclass(frozen=True)
class Took:
    """Time of a step: on the clock, of the processor, and the load of the machine at its end."""

    step: str
    seconds: float
    cpu_seconds: float
    load: float


def steps(page: str) -> list[Step]:
    """Return the steps of a page in order."""
    return [Step(m["name"], m["commands"], m["result"]) for m in STEP.finditer(page)]


def run(step: Step) -> None:
    """Run a step, unless its result is there, and record what it took.

    Exits if it fails, and with 130 once a step that Ctrl-C has stopped has ended: a training saves
    first.
    """
    if step.result is not None and Path(step.result).exists():
        print(f"== {step.name}: {step.result} is there", flush=True)
        return
    print(f"== {step.name}\n{step.commands}", end="", flush=True)
    scripts = Path(sys.executable).parent
    before, started = _cpu_seconds(), time.monotonic()
    with _left_to_the_step() as interrupts:
        done = subprocess.run(
            ["/bin/sh", "-e", "-c", step.commands],
            env=os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
            check=False,
        )
    took = Took(
        step.name,
        round(time.monotonic() - started, 1),
        round(_cpu_seconds() - before, 1),
        round(os.getloadavg()[0], 1),
    )
    record(took, again=step.result is None)
    if interrupts:
        print(f"stopped in step {step.name!r}; the same command resumes it", file=sys.stderr)
        sys.exit(130)
    if done.returncode:
        sys.exit(
            f"error: step {step.name!r} ended with {done.returncode}; the same command resumes it"
        )
    print(f"== {step.name}: {took.seconds:,.0f} s", flush=True)


@contextmanager
def _left_to_the_step() -> Iterator[list[int]]:
    """Yield the interrupts that arrive; the terminal sends them to the step's commands as well."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def record(took: Took, *, again: bool) -> None:
    """Add the time of a step to that of earlier attempts; replace it if the step runs `again`."""
    before = json.loads(TIMES.read_text()) if TIMES.exists() else []
    kept = [one for one in before if one["step"] != took.step]
    if not again:
        earlier = [one for one in before if one["step"] == took.step]
        took = replace(
            took,
            seconds=round(took.seconds + sum(one["seconds"] for one in earlier), 1),
            cpu_seconds=round(took.cpu_seconds + sum(one["cpu_seconds"] for one in earlier), 1),
        )
    TIMES.parent.mkdir(parents=True, exist_ok=True)
    TIMES.write_text(json.dumps([*kept, asdict(took)], indent=1) + "\n")


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run what is left of the page."""
    for step in steps(PAGE.read_text(encoding="utf-8")):
        run(step)
    for one in json.loads(TIMES.read_text()) if TIMES.exists() else []:
        print(f"{one['step']:<12} {one['seconds']:>7,.0f} s")


if __name__ == "__main__":
    main()
