# SPDX-License-Identifier: Apache-2.0
"""A stage on two ranks, started by the command line, and its processes, to kill some of them."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import psutil

from benchmarks.harness.machine import TREE
from data.prepare import prepare
from recipes.checkpoints.marker import MARKER, newest_checkpoint

LONGHAUL = Path(sys.executable).parent / "longhaul"
STAGE = "tiny_512"
SAVE_EVERY = 3
Victim = Literal["rank", "ranks", "agent", "command", "all"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
POLL_SECONDS = 0.002
START_SECONDS = 600.0
COMPARED = ("loss", "grad_norm", "lr", "tokens", "samples")
"""Of each step, that must be bit for bit the same."""


class State(NamedTuple):
    """What the folder of checkpoints holds."""

    complete: dict[int, Path]
    """Steps with a marker and without NeMo's sibling of an unfinished save."""
    unfinished: list[str]
    """Names of what a save or a removal has left half-way."""


class Run:
    """A run folder, the command that trains into it, and all of its processes."""

    def __init__(
        self,
        folder: Path,
        store: Path,
        steps: int,
        save_every: int = SAVE_EVERY,
        layout: str = "dp2 mb2 fp32 cpu",
    ) -> None:
        """Make a working folder, by which the processes are known."""
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True)
        self.words = [
            str(LONGHAUL), "pretrain", "--factory", STAGE, "--layout", layout,
            "--out", "run", "--store", str(store),
            f"trainer.max_steps={steps}", f"log.ckpt.every_n_train_steps={save_every}",
            "trainer.limit_val_batches=0", "data.global_batch_size=4",
            "trainer.callbacks[0].tokens_per_batch=2048",
        ]  # fmt: skip
        self.stage = self.folder / "run" / "stages" / STAGE
        self.checkpoints = self.stage / "checkpoints"
        self.metrics = self.stage / "metrics.jsonl"
        self.command: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with (self.folder / "output.log").open("ab") as log:
            self.command = subprocess.Popen(
                self.words, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def has_ended(self) -> bool:
        """Whether the command has ended."""
        assert self.command is not None
        return self.command.poll() is not None

    def finish(self) -> None:
        """Wait for the command's own end; raise RuntimeError if it fails."""
        assert self.command is not None
        if code := self.command.wait():
            raise RuntimeError(f"the command ended with {code}: {self.last_words()}")

    def last_words(self) -> str:
        """Return the end of what the command has printed."""
        return (self.folder / "output.log").read_text(errors="replace")[-2000:]

    def steps(self) -> dict[int, list[Any]]:
        """Return the compared values of the steps that are logged in whole lines."""
        if not self.metrics.exists():
            return {}
        lines = self.metrics.read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return {line["step"]: [line[name] for name in COMPARED] for line in whole}

    def log_file(self) -> int:
        """Return the inode of the log of steps, 0 if there is none."""
        return self.metrics.stat().st_ino if self.metrics.exists() else 0

    def state(self) -> State:
        """Return what the folder of checkpoints holds."""
        if not self.checkpoints.is_dir():
            return State({}, [])
        names = {path.name for path in self.checkpoints.iterdir()}
        folders = {name for name in names if name.startswith("step=")}
        complete = {
            int(name.removeprefix("step=")): self.checkpoints / name
            for name in folders
            if f"{name}-unfinished" not in names and (self.checkpoints / name / MARKER).exists()
        }
        whole = {path.name for path in complete.values()}
        return State(complete, sorted(folders - whole))

    def processes(self) -> list[psutil.Process]:
        """Return every process whose working folder is the run's."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if (
                    process.cwd() == str(self.folder)
                    and process.status() != psutil.STATUS_ZOMBIE
                    and process.pid != os.getpid()
                ):
                    found.append(process)
        return found

    def victims(self, victim: Victim, choose: Callable[[list[Any]], Any]) -> list[psutil.Process]:
        """Return the processes to kill: children of torchrun's agent are ranks."""
        assert self.command is not None
        command = psutil.Process(self.command.pid)
        everything = self.processes()
        if victim == "command":
            return [command]
        if victim == "all":
            return everything
        agents = [each for each in everything if _is_agent(each)]
        if victim == "agent":
            return agents
        ranks = [rank for agent in agents for rank in agent.children()]
        ranks.sort(key=lambda rank: rank.pid)
        return ranks if victim == "ranks" or not ranks else [choose(ranks)]

    def wait_for_end(self, seconds: float, last_step: int) -> int:
        """Wait for every process to end by itself; kill what is left, and return its number.

        Ranks that come to the last step are not waited for.
        """
        deadline = time.monotonic() + seconds
        while (not self.has_ended() or self.processes()) and (
            time.monotonic() < deadline and max(self.steps(), default=0) < last_step
        ):
            time.sleep(0.1)
        left = self.processes()
        kill(left)
        while self.processes():
            time.sleep(0.05)
        assert self.command is not None
        self.command.wait()
        return len(left)


def _is_agent(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(Path(word).name == "torchrun" for word in process.cmdline()[:3])
    return False


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to some processes."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def unreadable(checkpoint: Path) -> list[str]:
    """Return the files of a checkpoint that are not what its marker says."""
    listed = json.loads((checkpoint / MARKER).read_text())["files"]
    return [
        name
        for name, file in listed.items()
        if not (checkpoint / name).is_file()
        or hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() != file["sha256"]
    ]


def chosen_at_resume(run: Run) -> Path | None:
    """Return the checkpoint that the product's code takes at the next start."""
    return newest_checkpoint(run.checkpoints)


def write_store(folder: Path) -> Path:
    """Write a store of made-up words and return its folder."""
    source = folder / "words.jsonl"
    words = [f"{chr(97 + at % 26)}{at * 7919 % 1000}" for at in range(20_000)]
    with source.open("w") as file:
        for at in range(0, len(words), 200):
            file.write(json.dumps({"text": " ".join(words[at : at + 200])}) + "\n")
    store = folder / "store"
    prepare(str(source), store, vocab_size=512)
    return store


@contextmanager
def warm_start(cold: bool) -> Iterator[None]:
    """Have Python processes that import NeMo forked from one that has, unless `cold`."""
    sys.path.insert(0, str(TREE))
    from tests import warm_start as forked

    if cold or forked.FOLDER in os.environ:
        yield
        return
    forked.set_up()
    try:
        yield
    finally:
        forked.tear_down()
