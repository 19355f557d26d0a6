# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay for several functions, on CPU by gloo or on one GPU by NCCL.

CUDA does not survive a fork and imports take seconds, so a set of ranks is started once and is sent
functions with their arguments. Each function has a process group of its own; nothing of Megatron's
groups is left for the next one.

NCCL refuses two ranks of one GPU on the same host. `ON_ONE_GPU` and another `NCCL_HOSTID` for each
rank make every rank a host of its own, whose messages all go through sockets of the loopback
interface: that shows the messages to be right, and nothing of their speed.
"""

import atexit
import gc
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.utils._pytree import tree_map

from benchmarks.harness.machine import TREE
from custom_modules.cpu.gloo_device import one_gloo_device
from data.cuda_extension import prepare_process

T = TypeVar("T")
Device = Literal["cpu", "cuda"]
ON_ONE_GPU = MappingProxyType(
    {
        "NCCL_SOCKET_IFNAME": "lo",  # NCCL takes lo only where it finds no other interface
        "NCCL_SOCKET_FAMILY": "AF_INET",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_IB_DISABLE": "1",
        # Ways within a host, of which there is one for each rank; NCCL need not look for them.
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",  # its port is the same for every rank
        "NCCL_MAX_CTAS": "4",  # the ranks share the multiprocessors
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
        "NCCL_DEBUG": "WARN",
    }
)
"""Environment of every rank of one GPU."""
HOST_ID = "NCCL_HOSTID"
SETTLE_SECONDS = 0.5
"""In which the other ranks may tell why they failed too, before they are killed."""


class KeptRanks:
    """Processes that run functions together until they are closed, or one of them fails.

    `prepare` is called once on each rank, before the first function. Functions must be importable,
    and what they return picklable; tensors come back on the CPU.
    """

    def __init__(
        self, size: int, device: Device = "cpu", prepare: Callable[[], None] | None = None
    ) -> None:
        """Start the processes, which import while this one continues."""
        self._made = tempfile.TemporaryDirectory()
        self._ended = False
        self._calls = 0
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = get_context("spawn")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, device, prepare, theirs))
            with (
                mock.patch.dict(os.environ, _environment(rank, size, device)),
                mock.patch.object(sys, "path", [str(TREE), *sys.path]),  # a spawned rank has it too
            ):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.close)  # before multiprocessing waits for its children

    def __enter__(self) -> "KeptRanks":
        """Return the ranks, which end with the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self.close()

    @property
    def ended(self) -> bool:
        """Whether the ranks were closed, or killed since one had failed."""
        return self._ended

    def close(self) -> None:
        """End every rank with SIGKILL."""
        self._ended = True
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._made.cleanup()

    def run(self, function: Callable[..., T], *args: Any, timeout_seconds: float = 500) -> list[T]:
        """Return what `function(*args)` returns on each rank, in rank order.

        If it does not, all ranks are killed: the others would wait for the one that failed. Raises
        RuntimeError with the rank that failed first and its traceback, or that died, and
        TimeoutError with the ranks that had not answered.
        """
        store = str(Path(self._made.name) / f"store{self._calls}")
        self._calls += 1
        call = pickle.dumps((store, function, args))
        try:
            for pipe in self._pipes:
                with suppress(OSError):  # the rank has died; it is named below
                    pipe.send_bytes(call)
            answers = self._answers(timeout_seconds)
            self._require(answers, timeout_seconds)
        except BaseException:
            self.close()
            raise
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def _answers(self, timeout_seconds: float) -> dict[int, tuple[int, Any, str]]:
        """Return the answers by rank: all of them, or those that came until something went wrong.

        An answer is its time, the result and the traceback of a failure.
        """
        answers: dict[int, tuple[int, Any, str]] = {}
        pipes = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout_seconds
        failed = False
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes.values()), timeout=min(left, 1.0)):
                rank = next(rank for rank, one in pipes.items() if one is pipe)
                del pipes[rank]
                with suppress(EOFError, OSError):  # it has died
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]  # noqa: S301 our own ranks wrote it
                if (rank not in answers or answers[rank][2]) and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        return answers

    def _require(self, answers: dict[int, tuple[int, Any, str]], timeout_seconds: float) -> None:
        """Raise for the rank that went wrong first, if any did."""
        size = len(self._pipes)
        for rank, process in enumerate(self._processes):
            if rank in answers:
                continue
            process.join(SETTLE_SECONDS)  # its pipe closes before it has ended
            if not process.is_alive():
                raise RuntimeError(f"rank {rank} of {size} died with exit code {process.exitcode}")
        failures = [answer for answer in answers.values() if answer[2]]
        if failures:
            raise RuntimeError(min(failures, key=lambda answer: answer[0])[2])
        running = [rank for rank in range(size) if rank not in answers]
        if running:
            raise TimeoutError(f"ranks {running} of {size} had not ended in {timeout_seconds} s")


class KeptSets:
    """Kept ranks of a device by their number; a set that has failed is started anew."""

    def __init__(
        self,
        device: Device,
        prepare: Callable[[], None] | None = None,
        *,
        sizes: Iterable[int] = (),
    ) -> None:
        """Start sets of some sizes, which import meanwhile; those of others start when used."""
        self._device: Device = device
        self._prepare = prepare
        self._sets: dict[int, KeptRanks] = {}
        for size in sizes:
            self._set(size)

    def __enter__(self) -> "KeptSets":
        """Return the sets, which end with the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all ranks."""
        self.close()

    def run(
        self, function: Callable[..., T], size: int, *args: Any, timeout_seconds: float = 500
    ) -> list[T]:
        """Return what `function(*args)` returns on each of `size` ranks, as `KeptRanks.run`."""
        return self._set(size).run(function, *args, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """End all ranks."""
        for one in self._sets.values():
            one.close()

    def _set(self, size: int) -> KeptRanks:
        if size not in self._sets or self._sets[size].ended:
            self._sets[size] = KeptRanks(size, self._device, self._prepare)
        return self._sets[size]


def _environment(rank: int, size: int, device: Device) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    variables = {"OMP_NUM_THREADS": str(threads)}
    return variables if device == "cpu" else variables | ON_ONE_GPU | {HOST_ID: f"rank{rank}"}


def _serve(
    rank: int, size: int, device: Device, prepare: Callable[[], None] | None, pipe: Connection
) -> None:
    """Answer calls until the pipe is closed."""
    prepare_process()  # before a function's module imports Megatron-Core
    if device == "cuda":
        torch.cuda.set_device(0)
    with one_gloo_device():
        try:
            if prepare is not None:
                prepare()
            while (call := _received(pipe)) is not None:
                result = _result(call, rank, size, device)
                pipe.send_bytes(pickle.dumps((time.monotonic_ns(), result, "")))
                _leave_groups()
        except BaseException:
            text = f"rank {rank} of {size} failed:\n{traceback.format_exc()}"
            pipe.send_bytes(pickle.dumps((time.monotonic_ns(), None, text)))
            _received(pipe)  # the caller kills all ranks: another one may be waiting for this one


def _received(pipe: Connection) -> bytes | None:
    with suppress(EOFError, OSError):  # closed
        return pipe.recv_bytes()
    return None


def _result(call: bytes, rank: int, size: int, device: Device) -> Any:
    store, function, args = pickle.loads(call)  # noqa: S301 the process that started us
    backend = "nccl" if device == "cuda" else "gloo"
    joined = dist.FileStore(store, size)  # type: ignore[attr-defined]  # not in its __all__
    dist.init_process_group(backend, store=joined, rank=rank, world_size=size)
    dist.barrier()  # none leaves while another still connects
    return tree_map(_on_cpu, function(*args))


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _leave_groups() -> None:
    """Destroy every group that a function has left, Megatron-Core's too."""
    if "megatron.core.parallel_state" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
