# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo ranks of this machine, joined by a file: no port is taken.

Ranks are forked from a server that has imported what takes seconds and has run nothing, so they
share no state with the tests or each other and start at once.
"""

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing as mp

TREE = Path(__file__).resolve().parents[1]
IMPORTED_ONCE = ["torch.distributed", "custom_modules.long_context_gpt", "megatron.core.optimizer"]


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_seconds: float = 240
) -> list[Any]:
    """Return what `function(*args)` returns on each of `size` ranks, in rank order.

    The function must be importable, and what it returns picklable. Raises RuntimeError with the
    rank that failed first and its traceback, TimeoutError with the ranks that never ended.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        mock.patch.object(sys, "path", [str(TREE), *sys.path]),  # a spawned rank inherits it
    ):
        folder = Path(name)
        server = mp.get_context("forkserver")
        server.set_forkserver_preload(IMPORTED_ONCE)
        ranks = [
            server.Process(target=_rank, args=(rank, size, folder, function, args))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_seconds
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if any(process.exitcode for process in ranks):
                break  # the others would wait for it in their next collective
            time.sleep(0.02)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        _raise_failure(folder, codes, timeout_seconds)
        return [_load(folder / f"{rank}.result") for rank in range(size)]


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a gloo group inside this context."""
    with tempfile.TemporaryDirectory() as folder:
        _join(0, 1, Path(folder))
        try:
            yield
        finally:
            dist.destroy_process_group()


def _join(rank: int, size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _rank(
    rank: int, size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        _join(rank, size, folder)
        result = function(*args)
        dist.destroy_process_group()
    except BaseException:
        text = f"rank {rank} of {size} failed:\n{traceback.format_exc()}"
        _store(folder / f"{rank}.failure", (time.monotonic_ns(), text))
        raise
    _store(folder / f"{rank}.result", result)


def _store(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_bytes(pickle.dumps(value))
    temporary.rename(path)


def _load(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 our own ranks wrote it


def _raise_failure(folder: Path, codes: list[int | None], timeout_seconds: float) -> None:
    """Raise for the rank that went wrong first; `codes` are exit codes, None while running."""
    size = len(codes)
    for rank, code in enumerate(codes):
        if code and not (folder / f"{rank}.failure").exists():
            raise RuntimeError(f"rank {rank} of {size} died with exit code {code}")
    failures = [_load(path) for path in folder.glob("*.failure")]
    if failures:
        raise RuntimeError(min(failures)[1])
    running = [rank for rank, code in enumerate(codes) if code is None]
    if running:
        raise TimeoutError(f"ranks {running} of {size} had not ended in {timeout_seconds} s")
