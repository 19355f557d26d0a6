# SPDX-License-Identifier: Apache-2.0
"""Page-locked buffers when a process forks: what the kernel copies, and what the child has.

Without a GPU the pages are locked as a driver locks them (FOLL_LONGTERM), by registering them as
buffers of io_uring.
"""

import ctypes
import gc
import mmap
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from custom_modules.memory.pinned_pool import HostPool, own_pages
from custom_modules.profiling.memory_by_category import MemoryByCategory

SIZE = 4 * 2**20
"""Bytes of a buffer; below the usual limit of locked memory, 8 MiB."""
SETUP, REGISTER = 425, 427
"""Numbers of io_uring_setup(2) and io_uring_register(2), the same on every architecture."""
PARAMETERS_BYTES, REGISTER_BUFFERS = 120, 0


class Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@contextmanager
def locked(buffer: torch.Tensor) -> Iterator[None]:
    """Lock the pages of a buffer during the block, as a buffer of an io_uring."""
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(SETUP, 1, ctypes.create_string_buffer(PARAMETERS_BYTES))
    if ring < 0:
        pytest.skip(f"this kernel gives no io_uring: {os.strerror(ctypes.get_errno())}")
    try:
        vector = Vector(buffer.data_ptr(), buffer.numel())
        if libc.syscall(REGISTER, ring, REGISTER_BUFFERS, ctypes.byref(vector), 1) < 0:
            pytest.skip(f"pages cannot be locked: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        os.close(ring)


def in_child(what) -> bytes:
    """Return what a function returns in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write, what())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    said = os.read(read, 2**16)
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return said


def mapping(address: int) -> dict[str, str]:
    """Return the fields of /proc/self/smaps of the mapping at an address; empty for none."""
    here, fields = False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif here:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def copied(buffer: torch.Tensor) -> int:
    """Return the bytes of a buffer's mapping that a forked process has for itself alone."""

    def private() -> bytes:
        return mapping(buffer.data_ptr()).get("Private_Dirty", "0 kB").encode()

    return int(in_child(private).split()[0]) * 1024


def test_a_fork_copies_locked_memory_but_not_that_of_the_pool():
    plain = torch.frombuffer(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    ours, _ = HostPool(SIZE, pin=False).take(SIZE)
    assert copied(plain.fill_(1)) < SIZE / 10
    with locked(plain):
        assert copied(plain) >= SIZE
    with locked(ours.fill_(1)):
        assert copied(ours) == 0


def test_a_child_has_no_buffer_of_the_pool_and_leaves_the_parent_s_alone():
    pool = HostPool(2 * SIZE, pin=False)
    buffers = [pool.take(SIZE)[0].fill_(7) for _ in range(2)]
    pool.give(buffers.pop(), None)
    addresses = [buffer.data_ptr() for buffer in pool._buffers]
    assert all("dc" in mapping(at)["VmFlags"].split() for at in addresses)

    def release() -> bytes:
        """Map other memory where the buffers were, and then drop the child's pool."""
        holes = [mapping(at) for at in addresses]
        mine = [mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE) for _ in range(4)]
        for one in mine:
            one.write(b"1" * SIZE)
        nonlocal pool, buffers
        gone = weakref.ref(pool)
        del pool, buffers
        alone = all(one[SIZE - 1] == 49 for one in mine)
        return f"{holes} {gone() is None} {alone}".encode()

    assert in_child(release) == b"[{}, {}] True True"
    assert all(buffer.eq(7).all() for buffer in pool._buffers)


def test_what_is_reserved_is_taken_without_making_more_and_counts_towards_the_cap():
    pool = HostPool(3 * SIZE, pin=False)
    held, _ = pool.take(SIZE)
    pool.reserve(SIZE, 2)
    assert pool.sizes() == {SIZE: 3}
    addresses = {pool.take(SIZE)[0].data_ptr() for _ in range(2)}
    assert len(addresses | {held.data_ptr()}) == 3
    assert pool.made_bytes == 3 * SIZE
    with pytest.raises(MemoryError, match="its cap_gib is"):
        pool.reserve(SIZE, 1)


@pytest.mark.parametrize("size", [0, 1, 4097])
def test_a_buffer_has_the_size_asked_for_and_can_be_written(size):
    buffer = own_pages(size)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (size,))
    assert buffer.fill_(3).eq(3).all()


def test_buffers_are_counted_as_memory_of_the_host():
    with MemoryByCategory() as memory:
        pool = HostPool(SIZE, pin=False)
        pool.take(SIZE)
        assert memory.live["host"] == SIZE
        del pool
        gc.collect()
        assert memory.live["host"] == 0
