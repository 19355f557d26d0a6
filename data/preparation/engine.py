# SPDX-License-Identifier: Apache-2.0
"""Run the tasks of a plan: in this process, in processes of this machine, or on a Ray cluster.

A task whose process or node is lost is done again. The processes import neither torch nor
transformers, nor the script that called, nor files of the working folder (but for Python 3.10, if
one has the name of a module that `multiprocessing` imports as it starts). The nodes of a Ray
cluster see the folders of the sources and of the store; Ray is imported when it is used.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from data.formats.records import SourceError
from data.preparation.skip_limit import require_below_count
from data.preparation.work import Receipt, Work
from data.progress import progress, say

SMALL_BYTES = 2**26
"""Work of fewer bytes is done in this process: others would take longer to start."""
MOST_KILLED = 3
"""Processes that may be killed one after the other without a task done in between."""
MOST_LOST = 100
"""How often Ray runs a task again whose node or process was lost."""
ANSWER_SECONDS = 5.0
TREE = Path(__file__).resolve().parents[2]
ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
OF_PROCESSES = {**ONE_THREAD, "PYTHONSAFEPATH": "1"}
"""Variables of the processes of a pool."""

Done = Callable[[int, Receipt], None]
"""Receives the number and the receipt of a task that has been done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Where tasks run."""

    kind: Literal["pool", "ray"] = "pool"
    workers: int | None = None
    """Processes of the pool; None: one a processor, or none for a small source."""
    address: str | None = None
    """Of the Ray cluster; None: that of RAY_ADDRESS, or the one that this machine is part of."""

    def __post_init__(self) -> None:
        """Refuse an unknown engine, and options of another."""
        if self.kind not in ("pool", "ray"):
            raise ValueError(f"--engine {self.kind} is not known; choose pool or ray")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers {self.workers} is not at least 1")
        if self.kind == "pool" and self.address is not None:
            raise ValueError("--address is for a Ray cluster; add --engine ray")
        if self.kind == "ray" and self.workers is not None:
            raise ValueError("--workers is for the pool of this machine; leave out --engine ray")


def run_engine(work: Work, numbers: Sequence[int], engine: Engine) -> int:
    """Do the tasks that are not done yet, in the order given; return how many these were.

    Raises the error of the first that fails.
    """
    work.require_same_versions()
    cost = {number: work.shard(number).cost for number in numbers}
    total, left = sum(cost.values()), []
    done_bytes = documents = tokens = broken = 0
    for number in numbers:
        receipt = work.receipt(number)
        if receipt is None:
            left.append(number)
            continue
        done_bytes += cost[number]
        documents += receipt.documents
        tokens += receipt.tokens
    if 0 < len(left) < len(numbers):
        say(f"continuing: {len(numbers) - len(left):,} of {len(numbers):,} parts are there already")
    with progress("tokenizing", total) as advance:

        def done(number: int, receipt: Receipt) -> None:
            nonlocal done_bytes, documents, tokens, broken
            done_bytes += cost[number]
            documents += receipt.documents
            tokens += receipt.tokens
            broken += receipt.skipped.get("broken", 0)
            advance(done_bytes, documents, tokens)
            require_below_count(work.facts, broken, receipt.examples)

        if not left:
            return 0
        if engine.kind == "ray":
            _run_on_ray(work, left, done)
        elif engine.workers is None and sum(cost[number] for number in left) < SMALL_BYTES:
            from data.preparation.task import run_task

            for number in left:
                done(number, run_task(work, number))
        else:
            _run_in_pool(work, left, done, engine.workers or _cores())
    return len(left)


def _cores() -> int:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_in_pool(work: Work, numbers: Sequence[int], done: Done, workers: int) -> None:
    """Do tasks in `workers` processes; raise the error of the first that fails."""
    left, killed = dict.fromkeys(numbers), 0
    while left:
        with _pool(min(workers, len(left))) as pool:
            try:
                with _for_new_processes():
                    running = {pool.submit(_answer, str(work.folder), n): n for n in left}
                for future in as_completed(running):
                    done(running[future], _receipt(future.result(), work))
                    del left[running[future]]
                    killed = 0
            except BrokenProcessPool:
                how, killed = _kill(pool), killed + 1
                if killed == MOST_KILLED:
                    memory = "; the kernel does so when memory runs out (use fewer --workers)"
                    raise SourceError(
                        f"a process that prepared {_described(work, next(iter(left)))} or one of "
                        f"the {min(workers, len(left))} parts at the same time ended {MOST_KILLED} "
                        f"times in a row ({how}){memory if how == 'SIGKILL' else ''}"
                    ) from None


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes are ended at once on an error, also in the middle of a task."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        _kill(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _kill(pool: ProcessPoolExecutor) -> str:
    """Kill the processes of a pool; return how those that had ended before did.

    A pool that has lost a process ends the others by SIGTERM and waits for them. One that was just
    starting may outlive that.
    """
    processes = list((pool._processes or {}).values())
    ended = connection.wait([process.sentinel for process in processes], timeout=0)
    for process in processes:
        process.kill()
    codes = set()
    for process in (one for one in processes if one.sentinel in ended):
        end = time.monotonic() + ANSWER_SECONDS
        while process.exitcode is None and time.monotonic() < end:  # the pool's thread asks too
            time.sleep(0.01)
        codes.add(process.exitcode)
    return ", ".join(
        signal.Signals(-code).name if code < 0 else f"exit code {code}"
        for code in sorted(code for code in codes if code not in (None, 0, -signal.SIGTERM))
    )


@contextmanager
def _for_new_processes() -> Iterator[None]:
    """Have processes that are started run on one thread, without the script that called."""
    before, caller = dict(os.environ), sys.modules["__main__"]
    os.environ.update(OF_PROCESSES)
    sys.modules["__main__"] = ModuleType("__main__")  # a new process would import its file
    try:
        yield
    finally:
        sys.modules["__main__"] = caller
        for name in OF_PROCESSES:
            del os.environ[name]
        os.environ.update({name: before[name] for name in OF_PROCESSES if name in before})


def _begin() -> None:
    """Leave Ctrl-C to the process that started this one, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it reaches all processes
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _answer(folder: str, number: int) -> dict[str, Any]:
    """Do a task; return its receipt, or its error, as values that any process can read."""
    from data.preparation.task import run_task

    try:
        work = _work(folder, (Path(folder) / "plan.json").stat().st_mtime_ns)
        return {"receipt": run_task(work, number).json()}
    except ValueError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {"os_error": [error.errno, error.strerror or str(error), error.filename]}
    except MemoryError:
        return {"refused": f"part {number} needs more memory than there is; use fewer --workers"}


@lru_cache(maxsize=1)
def _work(folder: str, changed: int) -> Work:
    """Return the folder of a plan with its tokenizer, read once for all parts of a process."""
    del changed  # of another plan in the same folder
    work = Work(Path(folder))
    work.require_same_versions()
    return work


def _receipt(answer: dict[str, Any], work: Work) -> Receipt:
    """Return the receipt of an answer; raise the error if it has one."""
    if "refused" in answer:
        raise SourceError(answer["refused"])
    if "os_error" in answer:
        number, words, name = answer["os_error"]
        raise OSError(number, words, name or str(work.folder))
    return Receipt.of_json(answer["receipt"])


def _described(work: Work, number: int) -> str:
    """Return a shard in words, for an error."""
    pieces = work.shard(number).pieces
    more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    return f"part {number} ({pieces[0].path}{more})"


@contextmanager
def connected(engine: Engine) -> Iterator[None]:
    """Hold the connection to the engine's Ray cluster, or do nothing for another engine.

    An address that is not given, or `auto`, is that of RAY_ADDRESS, or of the cluster that this
    machine is part of. Raises SourceError within seconds if nothing answers there; Ray tries for
    minutes.
    """
    if engine.kind != "ray":
        yield
        return
    given = (engine.address, os.environ.get("RAY_ADDRESS"))
    tried = next((address for address in given if address not in (None, "", "auto")), None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray._private import services

    if ray.is_initialized():
        yield
        return
    if tried or not services.find_gcs_addresses():
        _require_answer(tried or _last_here())
    try:
        ray.init(
            address=tried or "auto",
            runtime_env={"env_vars": {"PYTHONPATH": str(TREE), **ONE_THREAD}},
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _without_cluster(tried, " ".join(str(error).split())[:200]) from error
    try:
        yield
    finally:
        ray.shutdown()


def _run_on_ray(work: Work, numbers: Sequence[int], done: Done) -> None:
    """Do tasks on the cluster (`connected`); raise the errors of tasks."""
    import ray
    from ray import exceptions

    task = ray.remote(num_cpus=1, max_retries=MOST_LOST)(_answer)
    running = {task.remote(str(work.folder), number): number for number in numbers}
    while running:
        for reference in ray.wait(list(running))[0]:
            number = running.pop(reference)
            try:
                answer = ray.get(reference)
            except exceptions.RayError as error:
                reason = " ".join(str(error).split())[:300]
                where = _described(work, number)
                raise SourceError(f"Ray cannot prepare {where}: {reason}") from error
            done(number, _receipt(answer, work))


def _last_here() -> str | None:
    """Return the address of the last cluster on this machine, by Ray's own file."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    with suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text(encoding="utf-8").strip()
    return None


def _require_answer(tried: str | None) -> None:
    """Raise SourceError if nothing listens at an address of a host and a port."""
    host, _, port = (tried or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _without_cluster(tried, reason.lower()) from error


def _without_cluster(tried: str | None, reason: str) -> SourceError:
    return SourceError(
        f"no Ray cluster answers at {tried or 'this machine'} ({reason}); start one with `ray "
        "start --head`, name it with --address HOST:PORT, or leave --engine out"
    )
