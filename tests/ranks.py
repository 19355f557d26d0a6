# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo ranks of this machine, joined by a file: no port is taken.

Ranks are forked from a server that has imported what takes seconds and has run nothing, so they
share no state with the tests or each other and start at once. With `pytest --device cuda` the tests
marked `parity` run on ranks of one GPU instead, over NCCL, which are kept for all of them.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness.kept_ranks import Device, KeptSets
from custom_modules.cpu.gloo_device import one_gloo_device
from tests import warm_start

T = TypeVar("T")
TREE = Path(__file__).resolve().parents[1]


class Server:
    """A process that has imported modules, from which ranks are forked."""

    def __init__(self, *modules: str) -> None:
        self.first_test = ""
        """The test that it started for, which all that its ranks compute is counted under."""
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(
            ["data.without_cuda_extension", *modules, "tests.frozen"]  # the last sees all objects
        )

    def start(self, function: Callable[..., None], *args: Any) -> mp.Process:
        process = mp.get_context("forkserver").Process(target=function, args=args)
        self.first_test = self.first_test or _test()
        # A server imports by PYTHONPATH, whatever folder it starts in; a rank by `sys.path`.
        searched = os.pathsep.join(filter(None, [str(TREE), os.environ.get("PYTHONPATH")]))
        with (
            # multiprocessing knows one server, whose modules are those of the first call.
            mock.patch.object(
                forkserver, "connect_to_new_process", self._server.connect_to_new_process
            ),
            mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=searched),
            mock.patch.object(sys, "path", [str(TREE), *sys.path]),
        ):
            process.start()
        return process


MEGATRON = Server("torch.distributed", "custom_modules.gpt.model", "megatron.core.optimizer")


class Ranks:
    """Ranks that run `function(*args)`; they end with the context, if not before.

    The function must be importable, and what it returns picklable.
    """

    def __init__(
        self, function: Callable[..., Any], size: int, *args: Any, server: Server = MEGATRON
    ) -> None:
        self._made = tempfile.TemporaryDirectory()
        self._folder = Path(self._made.name)
        self._server = server
        self._processes = [
            server.start(_rank, rank, size, self._folder, function, args) for rank in range(size)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        seconds = sum(float(path.read_text()) for path in self._folder.glob("*.cpu"))
        warm_start.count_under(_test(), seconds, self._server.first_test)
        self._made.cleanup()

    def kill(self) -> None:
        """End every rank with SIGKILL, and what it has started."""
        for process in self._processes:
            if process.exitcode is None:
                kill_tree(process.pid)
            process.join()

    def running(self) -> bool:
        """Return whether some rank runs and none has failed; others would wait for one that has."""
        codes = [process.exitcode for process in self._processes]
        return None in codes and not any(codes)

    def results(self, timeout_seconds: float) -> list[Any]:
        """Return what the function returns on each rank, in rank order.

        Raises RuntimeError with the rank that failed first and its traceback, TimeoutError with
        the ranks that never ended.
        """
        deadline = time.monotonic() + timeout_seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        codes = [process.exitcode for process in self._processes]
        self.kill()
        _raise_failure(self._folder, codes, timeout_seconds)
        return [_load(self._folder / f"{rank}.result") for rank in range(len(codes))]


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_seconds: float = 500
) -> list[Any]:
    """Return what `function(*args)` returns on each of `size` ranks, as `Ranks.results` does."""
    if KEPT is not None:
        return KEPT.run(function, size, *args, timeout_seconds=timeout_seconds)
    with Ranks(function, size, *args) as ranks:
        return ranks.results(timeout_seconds)


KEPT: KeptSets | None = None
"""Set by `keep`; without it every function has ranks of its own."""
STRIDE = 1
"""Of the cases that `some` takes; the same in the tests' process and on its ranks."""


def keep(device: Device, stride: int = 1) -> Callable[[], None]:
    """Run functions on ranks of a device that are kept; return what ends them."""
    global KEPT, STRIDE
    prepare = partial(_prepare, device, stride)
    KEPT, STRIDE = KeptSets(device, prepare, sizes=(2, 4)), stride  # they import meanwhile
    return KEPT.close


def some(cases: list[T]) -> list[T]:
    """Return the cases, or on a GPU some: messages of ranks that share one take milliseconds."""
    return cases[::STRIDE]


def _prepare(device: Device, stride: int) -> None:
    global STRIDE  # noqa: PLW0603
    import megatron.core.optimizer  # noqa: F401 while nobody waits for it

    from tests.custom_modules.support import plain_attention

    STRIDE = stride
    torch.set_default_device(device)
    torch.compiler.set_stance("force_eager")  # hundreds of shapes would be compiled each
    plain_attention.register()


def megatron_backend() -> AbstractContextManager[None]:
    """Return the context in which Megatron-Core computes on the device of this rank."""
    if torch.get_default_device().type == "cuda":
        return nullcontext()
    from custom_modules.cpu.backend import cpu_backend

    return cpu_backend(force=True)


def kill_tree(root: int) -> None:
    """Kill a process and all it started, children first."""
    if (forked := warm_start.forked_for(root)) is not None:
        kill_tree(forked)
    for task in Path(f"/proc/{root}/task").glob("*"):
        with suppress(OSError):  # a thread that has ended
            for child in (task / "children").read_text().split():
                kill_tree(int(child))
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGKILL)


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a gloo group inside this context."""
    with tempfile.TemporaryDirectory() as folder, one_gloo_device():
        _join(0, 1, Path(folder))
        try:
            yield
        finally:
            dist.destroy_process_group()


def join(store: dist.Store, rank: int, size: int) -> None:
    """Join a group of gloo, and return once every rank has.

    A rank that left it before would close the connections that a slower one is still making.
    """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()


def _join(rank: int, size: int, folder: Path) -> None:
    join(dist.FileStore(str(folder / "store"), size), rank, size)


def _test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "")


def _rank(
    rank: int, size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        with one_gloo_device():
            _join(rank, size, folder)
            result = function(*args)
            dist.destroy_process_group()
    except BaseException:
        text = f"rank {rank} of {size} failed:\n{traceback.format_exc()}"
        _store(folder / f"{rank}.failure", (time.monotonic_ns(), text))
        raise
    finally:
        (folder / f"{rank}.cpu").write_text(str(sum(os.times()[:4])))
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
