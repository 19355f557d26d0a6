# SPDX-License-Identifier: Apache-2.0
"""Tasks on a Ray cluster whose nodes see the folders of the sources and of the store.

Ray runs a task again on another node when its own is lost. Ray is imported when it is used.
"""

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from data.formats.records import SourceError
from data.preparation.engines.answers import described, receipt_of
from data.preparation.engines.in_process import Done
from data.preparation.work import Work
from data.store import StoreError

TREE = Path(__file__).resolve().parents[3]
MOST_LOST = 100
"""How often Ray runs a task again whose node or process was lost."""
ANSWER_SECONDS = 5.0
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to the cluster at an address, or stay connected to the one that is in use.

    None or `auto` is the address of RAY_ADDRESS, or of the cluster that this machine is part of.
    Raises SourceError within seconds if nothing answers at an address; Ray tries for minutes.
    """
    tried = _address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    own = not ray.is_initialized()
    if own and (tried or not _runs_here()):
        _require_answer(tried or _last_here())
    if own:
        try:
            ray.init(
                address=tried or "auto",
                runtime_env={"env_vars": {"PYTHONPATH": str(TREE), **_ONE_THREAD}},
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _without_cluster(tried, " ".join(str(error).split())[:200]) from error
    try:
        yield
    finally:
        if own:
            ray.shutdown()


def run_on_ray(work: Work, numbers: Sequence[int], done: Done, address: str | None) -> None:
    """Do tasks on the cluster at an address (`connected`); raise the errors of tasks."""
    with connected(address):
        import ray
        from ray import exceptions

        task = ray.remote(num_cpus=1, max_retries=MOST_LOST)(_answer)
        running = {task.remote(str(work.folder), number): number for number in numbers}
        while running:
            ready, _ = ray.wait(list(running))
            for reference in ready:
                number = running.pop(reference)
                try:
                    answer = ray.get(reference)
                except exceptions.RayError as error:
                    reason = " ".join(str(error).split())[:300]
                    where = described(work, number)
                    raise SourceError(f"Ray cannot prepare {where}: {reason}") from error
                done(number, receipt_of(answer, work))


def _address(given: str | None) -> str | None:
    """Return the address that is stated, None if Ray has to look for a cluster on this machine."""
    for stated in (given, os.environ.get("RAY_ADDRESS")):
        if stated not in (None, "", "auto"):
            return stated
    return None


def _runs_here() -> bool:
    """Return whether Ray finds the head of a cluster among the processes of this machine."""
    from ray._private import services

    return bool(services.find_gcs_addresses())


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


def _answer(folder: str, number: int) -> dict[str, Any]:
    from data.preparation.engines.worker import answer

    try:
        work = _work(folder, (Path(folder) / "plan.json").stat().st_mtime_ns)
    except StoreError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {"os_error": [error.errno, error.strerror or str(error), error.filename]}
    return answer(work, number)


@lru_cache(maxsize=1)
def _work(folder: str, changed: int) -> Work:
    """Return the folder of a plan with its tokenizer, read once for all parts of a process."""
    del changed  # of another plan in the same folder
    work = Work(Path(folder))
    work.require_same_versions()
    return work
