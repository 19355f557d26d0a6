# SPDX-License-Identifier: Apache-2.0
"""Whether hours of training leak memory, files, processes, semaphores or shared memory.

    python -m benchmarks.reliability.soak --minutes 120 --folder soak
    python -m benchmarks.reliability.soak --folder soak --page-only

Claim: after the first ten minutes the memory of each long-lived process stays within 2% (medians of
ten minutes; no minute has more than 10% over the first of them), its threads, sockets and open
files do not grow, and no turn of the loop leaves anything behind.

Long-lived are the processes of one `longhaul pretrain` (the command, torchrun's agent and two gloo
ranks that save and evaluate while they train), and those of a loop that rehearses the tiny ladder's
last two stages again and again (`benchmarks.reliability.command_loop`: the process that runs the
command, and the server that its ranks are forked from). Every few turns the whole ladder is
trained, evaluated and reported by `longhaul run` instead, a process of its own. After a turn there
may be no process, temporary file, semaphore or segment more than before. Where this process may, it
has a `/dev/shm` and System V's tables of its own (`unshare`).

A value of a minute is the median of its samples for bytes, and the smallest for counts, since a
save has a process and pipes more while it lasts. `FOLDER/samples.jsonl` has a line for each minute
and turn; the page is made from it at the end, and by `--page-only` at any time.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.harness.machine import TREE
from benchmarks.reliability.left_behind import (
    MARK,
    SHARED_MEMORY,
    Held,
    files_below,
    held,
    marked,
    over_a_minute,
    ranks_below,
    shared,
)
from benchmarks.reliability.soak_page import SAMPLES, page_of, write_page

LONGHAUL = Path(sys.executable).parent / "longhaul"
PRIVATE = "LONGHAUL_SOAK_PRIVATE"
"""Environment variable: this process has a `/dev/shm` of its own."""
GRACE_SECONDS = 60.0
"""Time that processes of a command that has ended may take to end too."""
START_SECONDS = 900.0
SAVE_EVERY, TRAINING_STEPS = 20, 100_000
LADDER = (
    "run", "--ladder", "tiny", "--eval-every", "2", "trainer.max_steps=4",
    "trainer.val_check_interval=2",
)  # fmt: skip
REHEARSAL = ("rehearse", "tiny_8k", "--ranks", "2")
TRAINING = (
    "pretrain", "--factory", "tiny_512", "--eval-every", str(SAVE_EVERY),
    f"trainer.max_steps={TRAINING_STEPS}", f"log.ckpt.every_n_train_steps={SAVE_EVERY}",
    "trainer.val_check_interval=50",
)  # fmt: skip


class Soak:
    """The folder of a soak, its processes, and the file of what was seen."""

    def __init__(self, folder: Path, pause: float) -> None:
        """Make the folders, each kind of process with temporary files of its own."""
        self.folder, self.pause = folder.resolve(), pause
        self.home, self.store = self.folder / "home", self.folder / "store"
        self.lived: dict[str, psutil.Process] = {}
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self.home.mkdir(parents=True)
        (self.folder / SAMPLES).unlink(missing_ok=True)

    def minutes(self) -> float:
        """Return the minutes since the long-lived processes were all there."""
        return (time.monotonic() - self.began) / 60

    def tell(self, **facts: Any) -> None:
        """Write a line of what was seen."""
        with self._lock, (self.folder / SAMPLES).open("a") as file:
            file.write(json.dumps({"minute": round(self.minutes(), 2), **facts}) + "\n")

    def start(self, mark: str, words: list[str], **given: Any) -> "subprocess.Popen[str]":
        """Start a command in a working folder of its own; its output goes to a log there."""
        work, temporary = self.folder / mark, self.folder / "tmp" / mark
        work.mkdir(exist_ok=True)
        temporary.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            MARK: f"{mark} {os.getpid()}", "TMPDIR": str(temporary), "HOME": str(self.home),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TREE), "PYTHONWARNINGS": "ignore",
            "PATH": os.pathsep.join((str(LONGHAUL.parent), os.environ["PATH"])),
        }  # fmt: skip
        with (self.folder / f"{mark}.log").open("a") as log:
            return subprocess.Popen(
                words, cwd=work, env=environment, text=True,
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **given},
            )  # fmt: skip

    def left(self, mark: str, known: set[int]) -> list[str]:
        """Return the processes with a mark that do not end by themselves, as words."""
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            running = [p for p in marked(f"{mark} {os.getpid()}") if p.pid not in known]
            if not running or time.monotonic() > deadline:
                return [described(process) for process in running]
            time.sleep(0.2)

    def names_that_stay(self) -> frozenset[str]:
        """Return semaphores and segments that are there for some seconds, as words."""
        stay: frozenset[str] | None = None
        for _ in range(5):
            now = shared()
            names = frozenset(
                {f"sem {n}" for n in now.semaphores} | {f"shm {n}" for n in now.segments}
            )
            stay = names if stay is None else stay & names
            time.sleep(1)
        assert stay is not None
        return stay

    def files(self, mark: str) -> frozenset[str]:
        """Return what is in the temporary and home folders, and in the command's own."""
        return files_below([self.folder / "tmp" / mark, self.home, self.folder / mark])


def described(process: psutil.Process) -> str:
    """Return the number and the words of a process."""
    words = list[str]()
    with suppress(psutil.Error):  # it has ended meanwhile
        words = process.cmdline()
    return f"{process.pid} {' '.join(words)[:200]}"


class Sampler(threading.Thread):
    """Look at the long-lived processes every few seconds and write a line each minute."""

    def __init__(self, soak: Soak, seconds: float) -> None:
        """Take the soak, and the seconds between two samples."""
        super().__init__(daemon=True)
        self.soak, self.seconds, self.over = soak, seconds, threading.Event()

    def run(self) -> None:
        """Sample until told to end, or until a process has gone."""
        minute, samples = 0, dict[str, list[Held]]()
        while not self.over.wait(self.seconds):
            for name, process in self.soak.lived.items():
                try:
                    samples.setdefault(name, []).append(held(process))
                except (psutil.Error, OSError):
                    if not self.over.is_set():
                        print(f"the process {name!r} has ended; see {self.soak.folder}")
                        os.kill(os.getpid(), signal.SIGTERM)  # the main thread waits for a turn
                    return
            if self.soak.minutes() >= minute + 1:
                minute = int(self.soak.minutes())
                self._write(samples)
                samples = {}

    def _write(self, samples: dict[str, list[Held]]) -> None:
        now = shared()
        self.soak.tell(
            processes={name: over_a_minute(of)._asdict() for name, of in samples.items()},
            semaphores=len(now.semaphores),
            segments=len(now.segments),
            temporary_files=len(files_below([self.soak.folder / "tmp"])),
        )


def start_training(soak: Soak) -> "subprocess.Popen[str]":
    """Start the long-lived training and return once it has taken a step."""
    training = soak.start(
        "training", [str(LONGHAUL), *TRAINING, "--out", "run", "--store", str(soak.store)]
    )
    metrics = soak.folder / "training" / "run" / "stages" / "tiny_512" / "metrics.jsonl"
    deadline = time.monotonic() + START_SECONDS
    while not (metrics.exists() and metrics.stat().st_size):
        if training.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the training took no step; see {soak.folder / 'training.log'}")
        time.sleep(0.5)
    command = psutil.Process(training.pid)
    soak.lived |= {"command": command, **ranks_below(command)}
    return training


def start_loop(soak: Soak) -> "subprocess.Popen[str]":
    """Start the loop; return it after its first turn, from which on it has all its processes."""
    words = [sys.executable, "-m", "benchmarks.reliability.command_loop"]
    loop = soak.start("loop", words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _turn_of_loop(soak, loop, soak.folder / "loop" / "first")
    process = psutil.Process(loop.pid)
    soak.lived["loop"] = process
    for child in process.children():
        words = child.cmdline()
        kind = "fork server" if "forkserver" in " ".join(words) else "resource tracker"
        soak.lived[kind] = child
    return loop


def _turn_of_loop(soak: Soak, loop: "subprocess.Popen[str]", run: Path) -> None:
    given: IO[str] | None = loop.stdin
    answers: IO[str] | None = loop.stdout
    assert given is not None
    assert answers is not None
    words = [*REHEARSAL, "--out", str(run), "--store", str(soak.store)]
    given.write(json.dumps(words) + "\n")
    given.flush()
    if (code := answers.readline()) != "0\n":
        raise RuntimeError(f"the rehearsal ended with {code!r}; see {soak.folder / 'loop.log'}")
    shutil.rmtree(run)


def _turn_of_command(soak: Soak, run: Path) -> None:
    words = [str(LONGHAUL), *LADDER, "--out", str(run), "--store", str(soak.store)]
    if soak.start("command", words).wait():
        raise RuntimeError(f"`longhaul run` failed; see {soak.folder / 'command.log'}")
    shutil.rmtree(run)


def turns(soak: Soak, loop: "subprocess.Popen[str]", given: Any) -> None:
    """Train the ladder again and again, and write what each turn leaves."""
    number, known = 0, {process.pid for process in soak.lived.values()}
    while soak.minutes() < given.minutes:
        number += 1
        is_command = number % given.command_every == 0
        mark = "command" if is_command else "loop"
        before, names, began = soak.files(mark), soak.names_that_stay(), time.monotonic()
        run = soak.folder / mark / f"turn{number}"
        if is_command:
            _turn_of_command(soak, run)
        else:
            _turn_of_loop(soak, loop, run)
        seconds = time.monotonic() - began
        soak.tell(
            turn=number, by=mark, seconds=round(seconds, 1),
            processes_left=soak.left(mark, known),
            files_left=sorted(soak.files(mark) - before),
            names_left=sorted(soak.names_that_stay() - names),
        )  # fmt: skip
        time.sleep(max(0.0, min(soak.pause, (given.minutes - soak.minutes()) * 60)))


def soaked(given: Any) -> None:
    """Run everything for the given minutes, end it, and write what was left at the end."""
    from data.synthetic import prepare_made_up
    from recipes.models import TINY

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends as well
    soak = Soak(given.folder, given.pause)
    prepare_made_up(soak.store, vocab_size=TINY.vocab)
    first = soak.names_that_stay()
    started = []
    try:
        started.append(loop := start_loop(soak))
        started.append(training := start_training(soak))
        soak.began = time.monotonic()
        sampler = Sampler(soak, given.sample_seconds)
        sampler.start()
        turns(soak, loop, given)
        sampler.over.set()
        sampler.join()
        training.send_signal(signal.SIGINT)  # its ranks save first
        code = training.wait(timeout=START_SECONDS)
        assert loop.stdin is not None
        loop.stdin.close()
        loop.wait(timeout=60)
        running = [
            each for mark in ("training", "loop", "command") for each in soak.left(mark, set())
        ]
        soak.tell(
            end=True, exit_code=code, processes_left=running,
            files_left=sorted(files_below(sorted((soak.folder / "tmp").iterdir()))),
            names_left=sorted(soak.names_that_stay() - first),
        )  # fmt: skip
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
        for mark in ("training", "loop", "command"):
            for left in marked(f"{mark} {os.getpid()}"):
                with suppress(psutil.Error):
                    left.kill()


def in_own_namespaces() -> None:
    """Start this program again with a `/dev/shm` and System V's tables of its own, if it may."""
    apart = ["unshare", "--mount", "--ipc"]
    if PRIVATE in os.environ or shutil.which("unshare") is None:
        return
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        return
    os.environ[PRIVATE] = "1"
    mount = f'mount -t tmpfs soak {SHARED_MEMORY} && exec "$@"'
    os.execvp("unshare", [*apart, "sh", "-c", mount, "sh", *sys.orig_argv])


def main() -> None:
    """Soak, and write the page; exit with 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--folder", type=Path, required=True, help="new folder of all files")
    parser.add_argument("--pause", type=float, default=20, help="seconds after each turn")
    parser.add_argument("--command-every", type=int, default=4, help="turns of `longhaul run`")
    parser.add_argument("--sample-seconds", type=float, default=5)
    parser.add_argument("--page-only", action="store_true", help="of the samples in the folder")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    if not given.page_only:
        if given.folder.exists():
            parser.error(f"{given.folder} exists; name a new folder")
        in_own_namespaces()
        soaked(given)
    text, holds = page_of(given.folder)
    write_page(text, given.folder, given.out)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
