# SPDX-License-Identifier: Apache-2.0
"""Tasks on a Ray cluster whose nodes see the folders of the sources and of the store.

Ray runs a task again on another node when its own is lost. Ray is imported when it is used.
"""

import os
from collections.abc import Sequence
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
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def run_on_ray(work: Work, numbers: Sequence[int], done: Done, address: str | None) -> None:
    """Do tasks on the cluster at an address; None or `auto`: the one that this machine is part of.

    Raises SourceError if there is no such cluster, and the errors of tasks.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import exceptions

    own = not ray.is_initialized()
    if own:
        try:
            ray.init(
                address=address or "auto",
                runtime_env={"env_vars": {"PYTHONPATH": str(TREE), **_ONE_THREAD}},
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SourceError(
                f"no Ray cluster answers at {address or 'auto'} ({reason}); start one with `ray "
                "start --head`, name it with --address, or leave --engine out"
            ) from error
    try:
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
    finally:
        if own:
            ray.shutdown()


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
