# SPDX-License-Identifier: Apache-2.0
"""Run jobs in order as one nemo-run experiment that stops at the first one that fails."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nemo_run as run
from torchx.specs import AppState

from data.files.whole import missing_folders, remove_empty
from slurm.local_executor import started_without_shell, stop_ranks
from slurm.outcome import VARIABLE, outcome, record_failure
from slurm.quoting import pack

LAST_LINES, LAST_CHARACTERS = 3, 200
"""Lines of a rank's output, and characters of each, shown if it raised nothing."""
KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
"""Signals that end a rank before it can raise anything."""
_NOTICE = re.compile(r"OneLogger|^No exporters were provided|transformer_engine not installed")
"""Notices that libraries print at every start; none explains why a rank ended."""
_ENDED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""torchrun's line on the rank that failed first."""

_NAMES_RANKS = re.compile(r"\S*CheckpointException: CheckpointException ranks:")
"""torch's line that only names ranks; what each of them raised follows."""


@dataclass(frozen=True)
class Job:
    """Name a task and the executor that runs it."""

    name: str
    task: run.Partial
    executor: run.Executor


class JobFailedError(RuntimeError):
    """Report a job that did not succeed."""

    def __init__(self, name: str, state: str, folder: Path, said: str = "") -> None:
        """Take the job's name, its state, the folder of its output, and its own message."""
        self.name, self.state, self.said = name, state, said
        log, reason = _first_error(folder)
        reason = said or reason
        if said and self.was_asked:
            super().__init__(said)
            return
        super().__init__(
            f"{name} ended as {state.lower()}"
            + (f": {reason}" if reason else "")
            + (f"; the output of its ranks is in {log}" if log else "")
        )

    @property
    def was_asked(self) -> bool:
        """Whether the user asked for the end, by a file `stop`."""
        return self.state.lower() == "stopped"


class Chain(run.Experiment):
    """An experiment whose jobs run in order, and end with it.

    nemo-run's own continues after a failed local job, and waits for a running job when interrupted.
    """

    tell: Callable[[str], Any] = print
    words: Mapping[str, Path] = MappingProxyType({})
    """Paths of the jobs' outcomes: a job that was told to stop succeeds, but is not finished."""

    def _prepare(self, exist_ok: bool = False) -> None:
        super()._prepare(exist_ok=exist_ok)
        for job in self.jobs:
            if isinstance(job.executor, run.LocalExecutor):
                for role in job._executable.roles:
                    started_without_shell(role, Path(job.executor.job_dir))
        pack([job.executor for job in self.jobs if isinstance(job.executor, run.SlurmExecutor)])

    def _wait_for_jobs(self, jobs: list[Any]) -> None:
        def stop(signum: int, frame: Any) -> None:
            stop_ranks(self.tell)
            for job in jobs:
                job.cancel(self._runner)
            raise KeyboardInterrupt

        before = {which: signal.signal(which, stop) for which in (signal.SIGINT, signal.SIGTERM)}
        try:
            super()._wait_for_jobs(jobs)
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
        for job in jobs:
            state, said = outcome(self.words[job.id]) if job.id in self.words else (None, "")
            if job.state != AppState.SUCCEEDED or state not in (None, "finished"):
                folder = Path(job.executor.job_dir)
                raise JobFailedError(job.id, state or job.state.name, folder, said)


def _first_error(folder: Path) -> tuple[Path | None, str]:
    """Return the newest combined output below a folder and the first exception that a rank raised.

    Without an exception, and where the rank that failed first was killed, after which the others
    raise that a connection is closed: how that rank ended, and what it wrote last.
    """
    logs = sorted(folder.rglob("combined.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return None, ""
    text = logs[-1].read_text(errors="replace")
    if (ended := _ENDED.search(text)) and -int(ended[1]) in KILLED:
        return logs[-1], _last_words(text)
    raised = re.findall(
        r"^(?:\[[^\]]*\]:?\s*)*([A-Za-z_.]*(?:Error|Exception)(?:: .+)?)$",
        text,
        flags=re.MULTILINE,
    )
    of_ranks = [line for line in raised if not _NAMES_RANKS.match(line)] or raised
    return logs[-1], of_ranks[0] if of_ranks else _last_words(text)


def _last_words(text: str) -> str:
    """Return how a rank without an exception ended, and the last lines of its output."""
    ended = _ENDED.search(text)
    if ended is None:
        return ""
    code, rank = int(ended[1]), ended[2]
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL:
        how += ", which the kernel sends when memory runs out"
    wrote = re.findall(rf"^\[[a-z]*{rank}\]:(.*\S)", text, flags=re.MULTILINE)
    lines = [line.strip() for line in wrote if not _NOTICE.search(line.strip())]
    last = " / ".join(line[:LAST_CHARACTERS] for line in lines[-LAST_LINES:])
    return f"rank {rank} {how}" + (f"; it wrote last: {last}" if last else "")


def run_in_order(
    title: str, jobs: Sequence[Job], folder: Path, tell: Callable[[str], Any] = print
) -> None:
    """Run each job after the one before it; raise JobFailedError at the first that fails.

    A job whose outcome is `continue` (`slurm.outcome`), such as after a loss spike, is run again.
    nemo-run's records, the serialized tasks and the output of the ranks go below `folder`; `tell`
    receives messages for the user.
    """
    words = {job.name: folder / "outcomes" / job.name for job in jobs}
    left = [_leaving_word(job, words[job.name]) for job in jobs]
    while left:
        for job in left:
            words[job.name].unlink(missing_ok=True)
        try:
            with _chain(title, left, folder) as chain:
                chain.tell, chain.words = tell, words
                _add(chain, left)
                chain.run(sequential=True)
            return
        except JobFailedError as error:
            if error.state != "continue":
                record_failure(words[error.name], str(error))
                raise
            tell(f"{error.name} continues: {error.said}")
            left = left[[job.name for job in left].index(error.name) :]


def _leaving_word(job: Job, word: Path) -> Job:
    executor = job.executor.clone()
    executor.env_vars = {**executor.env_vars, VARIABLE: str(word.resolve())}
    return replace(job, executor=executor)


def submit(title: str, jobs: Sequence[Job], folder: Path) -> dict[str, str]:
    """Hand all jobs to a scheduler, each after the one before it; return their numbers by name.

    The call does not wait for the jobs. The scheduler tests every script before one is submitted:
    raises ValueError with its own message if it rejects one. If it still refuses a job, those
    before it are cancelled.
    """
    for job, script in zip(jobs, scripts(title, jobs, folder).values(), strict=True):
        _require_taken(job, script)
    with nothing_to_read(), _chain(title, jobs, folder.absolute()) as chain:
        _add(chain, jobs)
        try:
            chain.run(sequential=True, detach=True)
        except BaseException:  # half a chain would run, and then run twice when submitted again
            for job in chain.jobs:
                job.cancel(chain._runner)
            raise
        return {job.id: str(job.handle).rpartition("/")[2] for job in chain.jobs}


def scripts(title: str, jobs: Sequence[Job], folder: Path) -> dict[str, str]:
    """Return the batch script of each job by name; nothing is submitted.

    Its paths are absolute: ranks start in a folder of their job.
    """
    made = missing_folders(folder)
    with nothing_to_read(), _chain(title, jobs, folder.absolute()) as chain:
        _add(chain, jobs)
        chain.dryrun(log=False)
        found = {job.id: job._dryrun_info.request.materialize() for job in chain.jobs}
    _remove_unused(title, folder, made)
    return found


@contextmanager
def nothing_to_read() -> Iterator[None]:
    """Keep nemo-run's programs (git, tar, sbatch) from reading this process's standard input."""
    before = sys.stdin
    with open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def _require_taken(job: Job, script: str) -> None:
    command = f"sbatch --test-only <<'LONGHAUL_SCRIPT'\n{script}\nLONGHAUL_SCRIPT"
    with nothing_to_read():
        said = job.executor.slurm.run(command, warn=True, hide=True)
    if said.return_code:
        words = " ".join((said.stderr or said.stdout).split())
        raise ValueError(f"Slurm rejects {job.name}: {words}")


def commands(title: str, jobs: Sequence[Job], folder: Path) -> list[str]:
    """Return the command line of each job; nothing is started and nothing stays on disk."""
    made = missing_folders(folder)
    with _chain(title, jobs, folder) as chain:
        _add(chain, jobs)
        chain.dryrun(log=False)
        requests = [job._dryrun_info.request for job in chain.jobs]
    _remove_unused(title, folder, made)
    return [
        shlex.join(replica.args)
        for request in requests
        for replicas in request.role_params.values()
        for replica in replicas
    ]


def _remove_unused(title: str, folder: Path, made: list[Path]) -> None:
    """Remove the folders that a dry run made; not empty are those in which a run left records."""
    experiments = folder / "experiments"
    remove_empty([experiments / title, experiments, *made])


def _chain(title: str, jobs: Sequence[Job], folder: Path) -> Chain:
    return Chain(
        title,
        executor=jobs[0].executor,
        base_dir=str(folder),
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    )


def _add(chain: Chain, jobs: Sequence[Job]) -> None:
    for job in jobs:
        chain.add(job.task, executor=job.executor, name=job.name)
