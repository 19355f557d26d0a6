# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a real training: whether each is named, by what, and whether nothing else is.

    python -m benchmarks.reliability.planted_faults
    python -m benchmarks.reliability.planted_faults --faults SlowRank NanSample

Claim: each fault is named by its kind in `health.jsonl`, by the alert command and by `longhaul
status --follow`, with the rank, the documents or the folder where there is one, and a sound
training has no finding. Each training is `longhaul pretrain` of the tiny model on two CPU ranks,
followed by that command; the fault is a callback on its ranks (`benchmarks.reliability.faults`),
which `sitecustomize` adds in them. The full disk is a small tmpfs where mounting is permitted, and
elsewhere a limit of file sizes.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.prepare import prepare
from recipes.checkpoints.marker import newest_checkpoint

TREE = Path(__file__).resolve().parents[2]
LONGHAUL = Path(sys.executable).parent / "longhaul"
STAGE = "tiny_512"
HOOK = """
import importlib.util, json, os, sys
PLANTED = os.environ.get("PLANTED_FAULT")
WHERE = "longhaul.jobs.watched_training"
class Planter:
    def find_spec(self, name, path=None, target=None):
        if name != WHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def run_and_plant(module):
            run(module)
            from benchmarks.reliability.faults import plant
            plant(module, *json.loads(PLANTED))
        spec.loader.exec_module = run_and_plant
        return spec
if PLANTED and "LOCAL_RANK" in os.environ:
    sys.meta_path.insert(0, Planter())
"""
"""`sitecustomize` of the ranks: Python imports it before anything else."""
PLACE, PACKAGE = re.compile(r"[^\s'\"]*/run/"), re.compile(r"[^\s'\"]*/site-packages/")
"""Paths of this machine, which a page does not show."""
TMPFS_MIB = 160
LARGEST_FILE = 400_000
"""Bytes of a file where no tmpfs can be mounted: more than a log, less than a checkpoint's."""
SECONDS = 1800
HEAD = [
    "planted",
    "named in health.jsonl",
    "what was said",
    "alerted",
    "watched",
    "others",
    "steps",
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, the kinds that name it, and the training that it is planted in."""

    fault: str
    kinds: tuple[str, ...]
    steps: int
    arguments: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    """The ranks that have to be named; None: any."""
    unrecorded: str = ""
    """Why `health.jsonl` cannot have it; empty if it can."""


CASES = (
    Case(fault="", kinds=(), steps=70),
    Case(fault="SlowRank", kinds=("straggler",), steps=26, ranks=(1,)),
    Case(fault="NanSample", kinds=("not_finite",), steps=14, arguments={"sample": 21}),
    Case(fault="DataStall", kinds=("data_starvation",), steps=26, ranks=(1,),
         words=("data.num_workers=1",)),
    Case(fault="Leak", kinds=("memory_creep",), steps=72, ranks=(1,)),
    Case(fault="Divergence", kinds=("divergence",), steps=150, arguments={"step": 60}),
    Case(fault="FullDisk", kinds=("disk_full", "failed_save"), steps=14,
         unrecorded="no room"),
    Case(fault="LostFolder", kinds=("folder_lost",), steps=14, unrecorded="no folder"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What named a fault."""

    case: Case
    recorded: list[dict[str, Any]]
    alerted: list[dict[str, Any]]
    watched: set[str]
    steps: int
    saved: bool
    """Whether a complete checkpoint is there."""

    @property
    def named(self) -> list[dict[str, Any]]:
        """The findings of the planted kind; of the alert where none can be recorded."""
        found = self.alerted if self.case.unrecorded else self.recorded
        return [one for one in found if one["kind"] in self.case.kinds]

    @property
    def others(self) -> set[str]:
        """Kinds that were named but not planted, except for the kinds that say how a run ended."""
        seen = {one["kind"] for one in (*self.recorded, *self.alerted)} | self.watched
        return seen - {*self.case.kinds, "ended", "failed"}

    @property
    def is_right(self) -> bool:
        """Whether the fault is named everywhere, by its ranks and documents, and nothing else."""
        if not self.case.kinds:
            return not self.others
        kinds = set(self.case.kinds)
        ranks = self.case.ranks
        return (
            bool(self.named)
            and (ranks is None or tuple(self.named[0].get("ranks", ())) == ranks)
            and (self.case.fault != "NanSample" or bool(self.named[0].get("documents")))
            and bool({one["kind"] for one in self.alerted} & kinds)
            and bool(self.watched & kinds)
            and not self.others
        )

    def row(self) -> list[str]:
        """Return the line of the page."""
        first = self.named[0] if self.named else {}
        said = str(first.get("said", "")).replace("|", "/")
        said = PLACE.sub("RUN/", PACKAGE.sub("", said))
        if self.case.fault == "NanSample" and first:
            said = said.partition("; run again")[0]
        kinds = {one["kind"] for one in self.alerted} & set(self.case.kinds)
        return [
            self.case.fault or "nothing",
            self.case.unrecorded or first.get("kind", "-"),
            said[:240],
            ", ".join(sorted(kinds)) or "-",
            ", ".join(sorted(self.watched & set(self.case.kinds))) or "-",
            ", ".join(sorted(self.others)) or "-",
            str(self.steps),
        ]


def train(case: Case, work: Path, store: Path) -> Outcome:
    """Train with a fault, watch it, and return what named the fault."""
    work.mkdir()
    hook = work / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    alerts = work / "alerts"
    with _small_disk(work / "disk") if case.fault == "FullDisk" else nullcontext(work) as place:
        run = (place or work) / "run"
        arguments = dict(case.arguments)
        if case.fault == "FullDisk":
            arguments["folder"] = str(run.parent)
        if case.fault == "LostFolder":
            arguments["run"] = str(run)
        command = [
            str(LONGHAUL), "pretrain", "--factory", STAGE, "--layout", "cpu dp2",
            "--out", str(run), "--store", str(store), "--alert", f"sh -c 'cat >> {alerts}'",
            f"trainer.max_steps={case.steps}", "log.ckpt.every_n_train_steps=10",
            "trainer.limit_val_batches=0", "data.global_batch_size=2", "data.micro_batch_size=1",
            "trainer.callbacks[0].tokens_per_batch=1024", *case.words,
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(hook), str(TREE)]), "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        if case.fault:
            environment["PLANTED_FAULT"] = json.dumps([case.fault, arguments])
        if case.fault == "FullDisk" and place is None:
            limited = f'ulimit -f {LARGEST_FILE // 512}; exec "$@"'
            command = ["sh", "-c", limited, "sh", *command]
        with (work / "output.log").open("w") as log, (work / "watch.jsonl").open("w") as seen:
            training = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                cwd=work,
            )  # fmt: skip
            stage = run / "stages" / STAGE
            _wait(lambda: stage.is_dir() or training.poll() is not None)
            watching = subprocess.Popen(
                [str(LONGHAUL), "status", str(run), "--follow", "--json"],
                stdout=seen, stderr=log, cwd=work,
            )  # fmt: skip
            training.wait(SECONDS)
            away = Path(f"{run}.away")
            if away.is_dir():
                _wait(lambda: "folder_lost" in (work / "watch.jsonl").read_text(), 60)
                _merge(away, run)
            try:
                watching.wait(60)
            except subprocess.TimeoutExpired:
                watching.terminate()
                watching.wait()
        lines = _lines(stage / "metrics.jsonl")
        return Outcome(
            case=case,
            recorded=[one for one in _lines(stage / "health.jsonl") if one.get("state") != "ends"],
            alerted=_lines(alerts),
            watched=_kinds(_lines(work / "watch.jsonl")),
            steps=lines[-1]["step"] if lines else 0,
            saved=newest_checkpoint(stage / "checkpoints") is not None,
        )


def _kept(case: Case, work: Path, store: Path) -> Outcome:
    """Return the outcome of a training that an interrupted benchmark has ended, or train."""
    file = work / "outcome.json"
    if file.exists():
        kept = json.loads(file.read_text())
        return Outcome(case=case, **{**kept, "watched": set(kept["watched"])})
    if work.exists():
        shutil.rmtree(work)
    outcome = train(case, work, store)
    kept = {name: getattr(outcome, name) for name in ("recorded", "alerted", "steps", "saved")}
    file.write_text(json.dumps({**kept, "watched": sorted(outcome.watched)}))
    return outcome


@contextmanager
def _small_disk(folder: Path) -> Any:
    """Yield a small file system of its own; None where none may be mounted."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount")
        and not subprocess.run(words, capture_output=True, check=False).returncode
    )
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _merge(away: Path, run: Path) -> None:
    """Bring back a folder, in which processes may have made new files meanwhile."""
    shutil.copytree(away, run, dirs_exist_ok=True)


def _wait(holds: Any, seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.2)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def _kinds(looks: Sequence[dict[str, Any]]) -> set[str]:
    """Return the kinds of findings in the looks of `longhaul status --follow --json`."""
    return {
        finding["kind"]
        for look in looks
        for place in (look, *look["stages"])
        for finding in place["findings"]
    }


def main() -> None:
    """Plant the faults one after the other and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", nargs="*", help="only these; '' is the sound training")
    parser.add_argument(
        "--work", type=Path, help="keep the runs here; those that have ended are not repeated"
    )
    parser.add_argument("--out", type=Path, help="write the page there")
    given = parser.parse_args()
    cases = [case for case in CASES if given.faults is None or case.fault in given.faults]
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        work.mkdir(exist_ok=True, parents=True)
        store = work / "store"
        if not store.exists():
            prepare(str(Path(os.__file__).parent / "asyncio"), store, vocab_size=512)
        outcomes = []
        for case in cases:
            outcomes.append(_kept(case, work / (case.fault or "sound"), store))
            sys.stderr.write(" | ".join(outcomes[-1].row()) + "\n")
    right = sum(outcome.is_right for outcome in outcomes)
    said = (
        f"{right} of {len(outcomes)} trainings were judged right: the fault was named in "
        "health.jsonl where that can be written, by the alert command and by `longhaul status "
        "--follow`, and nothing else was."
    )
    load = {"load over a minute": f"{os.getloadavg()[0]:.1f}"}
    text = page(
        "Faults planted in a training, and what named them",
        {**facts(("megatron-core", "nemo_toolkit")), **load},
        [table(HEAD, [outcome.row() for outcome in outcomes]), said],
    )
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)
    if right < len(outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
