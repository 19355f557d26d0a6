# SPDX-License-Identifier: Apache-2.0
"""Errors of one rank while a checkpoint is saved, kept until all ranks can agree on them.

In a save of Megatron-Core (0.15.3) ranks wait for each other several times. Where one rank raises
between two such points, because its disk is full or a folder has vanished, the others wait for it
until the timeout of the collective. So what touches files there records its error instead, under
the folder that it was saving into, and the ranks ask for these errors at the end
(`recipes.nemo2.checkpoint_callback`).

Megatron also waits without end for a writing process that was killed; here that is an error.
"""

import queue
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import _disable_gc
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

PAUSE = 0.5
"""Seconds between two looks at whether a writing process still runs."""
KILLED = "a process that wrote the checkpoint was killed"
_recorded: dict[Path, list[BaseException]] = {}


def record(folder: str | Path, error: BaseException) -> None:
    """Keep an error of a save into a checkpoint folder or the folder of its weights."""
    _recorded.setdefault(Path(folder), []).append(error)


def take(checkpoint: Path) -> list[BaseException]:
    """Return this rank's errors of a save into a checkpoint, and forget them."""
    of = [folder for folder in _recorded if folder == checkpoint or folder.parent == checkpoint]
    return [error for folder in of for error in _recorded.pop(folder)]


def record_errors() -> None:
    """Let Megatron's savers record errors instead of raising them; once for the process."""
    if getattr(TorchCommonSaveStrategy.save_common, "__wrapped__", None) is not None:
        return
    TorchCommonSaveStrategy.save_common = _recording(
        TorchCommonSaveStrategy.save_common, lambda saver, state, folder: folder
    )
    FileSystemWriterAsync.finish = _recording(
        FileSystemWriterAsync.finish, lambda writer, *_: writer.checkpoint_dir
    )
    serialization.save_config = _recording(
        serialization.save_config, lambda config, folder, *_: folder
    )
    torch_strategy.save_state_dict_async_finalize = _recording(
        torch_strategy.save_state_dict_async_finalize, lambda writer, *_: writer.checkpoint_dir
    )
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write_in_processes)
    FileSystemWriterAsync.retrieve_write_results = _results_or_error(
        FileSystemWriterAsync.retrieve_write_results
    )


def start_over() -> None:
    """Let the next save have a queue of its own: the process that holds it may be gone."""
    filesystem_async._results_queue = None


def _results_or_error(retrieve: Callable[..., Any]) -> Callable[..., Any]:
    """Return `retrieve`, which then returns an error of its queue, as it does those of writers."""

    @wraps(retrieve)
    def call(writer: FileSystemWriterAsync) -> Any:
        try:
            return retrieve(writer)
        except (OSError, EOFError) as error:
            return _wrap_exception(error)

    return call


def _recording(function: Callable[..., Any], folder: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (OSError, RuntimeError, CheckpointException) as error:
            record(folder(*args, **kwargs), error)
            return None

    return call


@_disable_gc()  # a collection in a fork would free CUDA tensors
def write_in_processes(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Any
) -> None:
    """Write each bucket in a forked process; put the results of all, or the first error.

    As Megatron's, and a process that ends without a result is an error.
    """
    context = mp.get_context("fork")
    local, unfinished = context.Queue(), context.JoinableQueue()
    more = {"use_msc": True} if use_msc else {}
    running = {}
    for number, bucket in enumerate(buckets):
        unfinished.put(number)
        running[number] = context.Process(
            target=partial(FileSystemWriterAsync.write_preloaded_data, transforms),
            kwargs={
                "local_proc_idx": number,
                "write_bucket": bucket,
                "results_queue": local,
                "count_queue": unfinished,
                "use_fsync": True,
                **more,
            },
        )
    for process in running.values():
        process.start()
    collected = _collected(running, local)
    with suppress(OSError, EOFError):  # the queue is gone, which is found when it is read
        results.put(collected)


def _collected(running: dict[int, Any], local: Any) -> dict[int, Any] | Exception:
    """Return the result of each process, or the first error; all have ended then."""
    written: dict[int, Any] = {}
    failed: Exception | None = None
    while running:
        try:
            number, result = local.get(timeout=PAUSE)
        except queue.Empty:
            number, result = _ended(running)
            if number is None:
                continue
        running.pop(number).join()
        if isinstance(result, Exception):
            failed = failed or result
        written[number] = result
    return failed or written


def _ended(running: dict[int, Any]) -> tuple[int | None, Exception | None]:
    """Return a process that ended without a result, and the error; None for none."""
    for number, process in running.items():
        if process.exitcode not in (None, 0):
            return number, RuntimeError(KILLED)
    return None, None
