# SPDX-License-Identifier: Apache-2.0
"""Pinned memory: the rate of its copies, and what a fork costs while it is held."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.blocks import Device
from benchmarks.gpu.sizes import Sizes
from custom_modules.memory.pinned_pool import HostPool

COPIES = 5


def copies(sizes: Sizes) -> dict[str, Any]:
    """Return GB/s of pinned copies out of the device and back; on a CPU those within memory."""
    device, on_cuda = Device(torch.device(sizes.device)), sizes.device == "cuda"
    host = torch.empty(sizes.copy_bytes, dtype=torch.uint8, pin_memory=on_cuda)
    there = torch.empty_like(host, device=device.device)
    rates = {}
    for name, target, source in (("out", host, there), ("back", there, host)):
        copy = partial(target.copy_, source, non_blocking=True)
        copy()
        seconds = min(device.seconds(copy) for _ in range(COPIES))
        rates[name] = host.nbytes / seconds / 1e9
    return {"bytes": sizes.copy_bytes, "gbps": rates}


def fork(sizes: Sizes) -> dict[str, Any]:
    """Return seconds of a fork, and the child's own bytes, by what pinned memory is held."""
    on_cuda, size = sizes.device == "cuda", sizes.fork_bytes
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "the offload's pool": lambda: _pool(size, pin=on_cuda),
        "registered pages that a fork gets": lambda: _registered(size, pin=on_cuda),
        "torch's pinned memory": lambda: torch.zeros(size, dtype=torch.uint8, pin_memory=on_cuda),
    }
    for name, hold in ways.items():
        held = hold()
        seconds, dirty = _forked()
        found[name] = {"seconds": seconds, "child_bytes": dirty}
        if isinstance(held, torch.Tensor) and name.startswith("registered") and on_cuda:
            torch.cuda.cudart().cudaHostUnregister(held.data_ptr())
        del held
    return {"bytes": size, "held": found}


def _pool(size: int, *, pin: bool) -> object:
    pool = HostPool(size, pin=pin)
    buffer, _ = pool.take(size)
    buffer.zero_()
    return pool, buffer


def _registered(size: int, *, pin: bool) -> torch.Tensor:
    pages = torch.zeros(size, dtype=torch.uint8)
    if pin and (error := int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), size, 0))):
        raise MemoryError(f"{size:,} bytes could not be registered: CUDA error {error}")
    return pages


def _forked() -> tuple[float, int]:
    """Fork once; return its seconds, and the bytes that the child has for itself at once."""
    read, write = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:  # no library is called: CUDA does not survive a fork
        try:
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            own = next(line.split()[1] for line in lines if line.startswith("Private_Dirty:"))
            os.write(write, own.encode())
        finally:
            os._exit(0)
    seconds = time.perf_counter() - start
    os.close(write)
    with os.fdopen(read) as answer:
        own_kib = answer.read()
    os.waitpid(child, 0)
    return seconds, int(own_kib or 0) * 1024
