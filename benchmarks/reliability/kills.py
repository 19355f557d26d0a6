# SPDX-License-Identifier: Apache-2.0
"""Whether a stage ends the same after SIGKILLs at any moment, inside saves too.

    python -m benchmarks.reliability.kills
    python -m benchmarks.reliability.kills --kills 10 --seed 3 --cold

Claim: the losses, gradient norms, rates and samples of every step are bit for bit those of an
undisturbed run, each batch is read once, no unreadable checkpoint is ever chosen, and nothing is
left running.

The tiny model is trained on two gloo ranks by `longhaul pretrain`, which saves every few steps.
The same command is started again after each kill until the stage ends. Killed are, in turn, one
rank, all ranks, torchrun's agent, the command alone, and every process. The moment is drawn: some
time after the start, some time after a number of steps, or inside a save, for which the folder of
checkpoints is watched. Processes that a kill leaves may end by themselves, in some seconds and
steps; what runs after that is killed too, and counted. Before each start the checkpoint that would
be chosen is read and compared with its checksums, here and not by the code under test.

Python processes that import NeMo are forked from one that has (`tests/warm_start`), which makes a
start cost seconds of CPU time; with `--cold` each imports NeMo by itself.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.reliability.killed_run import (
    POLL_SECONDS,
    SAVE_EVERY,
    START_SECONDS,
    VICTIMS,
    Run,
    Victim,
    chosen_at_resume,
    kill,
    unreadable,
    warm_start,
    write_store,
)

Moment = Literal["start", "steps", "save"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
STEPS_FOR_A_KILL = 7
STEPS_AFTER = 2 * SAVE_EVERY
"""Steps that ranks without their agent or command may take before they are killed too."""


@dataclass(slots=True)
class Kill:
    """One kill and what came of it."""

    number: int
    victim: Victim
    moment: Moment
    seconds: float = 0.0
    """From the start of the command to the kill."""
    killed: int = 0
    """Processes that were sent SIGKILL."""
    step: int = 0
    """Last logged at the kill."""
    in_save: bool = False
    """Whether a save or a removal was left half-way."""
    chosen: int = 0
    """Step of the checkpoint that the next start takes."""
    ended: float = 0.0
    """Seconds until the other processes had ended, or were killed."""
    left: int = 0
    """Processes that did not end by themselves."""


@dataclass(slots=True)
class Pace:
    """What the runs so far have shown of how long things take, in seconds."""

    start: float
    step: float
    save: float


def paced(run: Run) -> Pace:
    """Run to the end, and return how long the start, a step and a save took."""
    began = time.monotonic()
    run.start()
    first, saves, saving = 0.0, list[float](), None
    while not run.has_ended():
        if not first and run.steps():
            first = time.monotonic() - began
        half = bool(run.state().unfinished)
        if half and saving is None:
            saving = time.monotonic()
        elif not half and saving is not None:
            saves.append(time.monotonic() - saving)
            saving = None
        time.sleep(0.01)
    run.finish()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = statistics.median(line["seconds"] for line in lines)
    return Pace(first, steps, statistics.median(saves) if saves else steps)


def wait_for_moment(run: Run, moment: Moment, pace: Pace, draw: random.Random) -> None:
    """Return at the moment of a kill; raise RuntimeError if the command ends before."""
    began, before = time.monotonic(), set(run.state().unfinished)
    newest = max(run.state().complete, default=0)
    log, steps = run.log_file(), draw.randint(1, 2 * SAVE_EVERY)
    after = draw.random()
    while True:
        if run.has_ended():
            raise RuntimeError(f"the command ended before it was killed: {run.last_words()}")
        if time.monotonic() - began > START_SECONDS:
            raise RuntimeError(f"the moment {moment!r} never came: {run.last_words()}")
        if moment == "start" and time.monotonic() - began >= after * pace.start:
            return
        # A resumed training replaces its log by one without the lines of lost steps.
        reached = max(run.steps(), default=0) if run.log_file() != log else 0
        if moment == "steps" and reached >= newest + steps:
            time.sleep(after * pace.step)
            return
        if moment == "save" and set(run.state().unfinished) - before:
            time.sleep(after * pace.save)
            return
        time.sleep(POLL_SECONDS)


def killed_once(run: Run, kill_of: Kill, pace: Pace, draw: random.Random, grace: float) -> None:
    """Start the command, kill at the moment, and note what is left."""
    began, before = time.monotonic(), set(run.state().unfinished)
    run.start()
    wait_for_moment(run, kill_of.moment, pace, draw)
    victims: list[object] = []
    while not victims:  # ranks and agent come some seconds after the command
        found = run.victims(kill_of.victim, draw.choice)
        kill(found)
        victims = list(found)
        if run.has_ended():
            break
    kill_of.seconds = time.monotonic() - began
    kill_of.killed = len(victims)
    state, ended = run.state(), time.monotonic()
    kill_of.step = max(run.steps(), default=0)
    kill_of.left = run.wait_for_end(grace, kill_of.step + STEPS_AFTER)
    kill_of.ended = time.monotonic() - ended
    kill_of.in_save = bool({*state.unfinished, *run.state().unfinished} - before)


def check(run: Run, kill_of: Kill, expected: dict[int, list[object]]) -> Iterator[str]:
    """Yield what is wrong after a kill: steps that differ, and a checkpoint that is not whole."""
    for step, values in run.steps().items():
        if values != expected[step]:
            yield f"kill {kill_of.number}: step {step} has {values}, not {expected[step]}"
    chosen = chosen_at_resume(run)
    complete = run.state().complete
    if chosen is None:
        if complete:
            yield f"kill {kill_of.number}: no checkpoint is chosen of {sorted(complete)}"
        return
    kill_of.chosen = int(chosen.name.removeprefix("step="))
    if kill_of.chosen != max(complete, default=0):
        yield f"kill {kill_of.number}: {chosen.name} is chosen of {sorted(complete)}"
    for name in unreadable(chosen):
        yield f"kill {kill_of.number}: {chosen.name} is chosen and its {name} is not whole"


def main() -> None:
    """Kill, compare, and write the page; exit with 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, help="of the stage; default: 7 for each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace", type=float, default=30, help="seconds for others to end")
    parser.add_argument("--cold", action="store_true", help="import NeMo in every process")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    steps = given.steps or STEPS_FOR_A_KILL * given.kills + 2 * STEPS_AFTER
    draw, kills, wrong = random.Random(given.seed), list[Kill](), list[str]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as name, warm_start(given.cold):
        folder = Path(name).resolve()
        store = write_store(folder)
        paced(Run(folder / "first", store, SAVE_EVERY))  # imports, and files into the page cache
        pace = paced(Run(folder / "paced", store, 2 * SAVE_EVERY))
        print(pace, file=sys.stderr)
        plain = Run(folder / "undisturbed", store, steps, save_every=steps)
        plain.start()
        plain.finish()
        expected, run = plain.steps(), Run(folder / "killed", store, steps)
        for number in range(1, given.kills + 1):
            victim = VICTIMS[(number - 1) % len(VICTIMS)]
            moment = "save" if number % 2 else draw.choice(MOMENTS[:2])
            if steps - max(run.state().complete, default=0) <= 2 * STEPS_AFTER:
                victim, moment = "all", "start"  # others would let it come to its end
            kill_of = Kill(number, victim, moment)
            killed_once(run, kill_of, pace, draw, given.grace)
            wrong += check(run, kill_of, expected)
            kills.append(kill_of)
            print(json.dumps(asdict(kill_of)), file=sys.stderr)
        run.start()
        run.finish()
        final = run.steps()
        running = len(run.processes()) + len(plain.processes())
        of_last = [unreadable(path) for path in run.state().complete.values()]
    samples = [values[-1] for values in final.values()]
    once = samples == [[4 * at, 4 * at + 3] for at in range(steps)]
    claims = {
        f"all {steps} steps bit for bit those of the undisturbed run": final == expected,
        "each batch read once": once,
        "no checkpoint chosen that was not whole, no step computed with other values": not wrong,
        "last checkpoint whole": of_last == [[]],
        "nothing left running": running == 0,
    }
    text = page(
        f"{given.kills} SIGKILLs of one stage",
        {
            **facts(("nemo-toolkit", "megatron-core", "psutil")),
            "load over a minute": f"{os.getloadavg()[0]:.1f}",
        },
        sections(given, pace, kills, claims, time.monotonic() - began) + [f"* {w}" for w in wrong],
    )
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)
    sys.exit(0 if all(claims.values()) else 1)


def sections(
    given: argparse.Namespace,
    pace: Pace,
    kills: list[Kill],
    claims: dict[str, bool],
    seconds: float,
) -> list[str]:
    """Return the tables."""
    by_victim = []
    for victim in VICTIMS:
        of = [each for each in kills if each.victim == victim]
        if of:
            by_victim.append(
                [
                    victim, "", str(len(of)), str(sum(each.in_save for each in of)),
                    str(sum(each.killed for each in of)), str(sum(each.left for each in of)),
                    f"{statistics.median(each.ended for each in of):.1f}",
                    f"{max(each.ended for each in of):.1f}",
                ]
            )  # fmt: skip
    rows = [
        [
            str(each.number), f"{each.victim}, {each.moment}", f"{each.seconds:.1f}",
            str(each.step), "yes" if each.in_save else "no", str(each.chosen),
            str(each.killed), str(each.left), f"{each.ended:.1f}",
        ]
        for each in kills
    ]  # fmt: skip
    inside = sum(each.in_save for each in kills)
    how = "each process imports NeMo" if given.cold else "processes forked from a warm server"
    return [
        f"The tiny model, fp32, two gloo ranks, 4 sequences of 512 tokens a step, saved every "
        f"{SAVE_EVERY} steps; seed {given.seed}, {how}. Undisturbed: first step after "
        f"{pace.start:.1f} s, {pace.step:.2f} s a step, {pace.save:.2f} s a save. "
        f"{inside} of {len(kills)} kills left a save or a removal half-way. "
        f"{seconds / 60:.0f} minutes in all.",
        table(
            ["claim", ""],
            [[claim, "holds" if holds else "DOES NOT HOLD"] for claim, holds in claims.items()],
        ),
        f"By what was killed; others may end by themselves within {given.grace:.0f} s and "
        f"{STEPS_AFTER} steps, then they are killed:",
        table(
            ["killed", "", "kills", "in a save", "processes killed", "left after that",
             "s to the end, median", "s to the end, most"],
            by_victim,
        ),
        "Each kill; `chosen` is the step that the next start resumes from:",
        table(
            ["number", "killed, moment", "s after start", "last step", "in a save", "chosen",
             "processes killed", "left", "s to the end"],
            rows,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
