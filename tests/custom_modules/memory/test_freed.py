# SPDX-License-Identifier: Apache-2.0
"""Freed memory below memory in use goes back to the system."""

import ctypes
import platform
from pathlib import Path

import pytest

from custom_modules.memory.freed import give_back

KIB = 1024
BLOCKS, BLOCK = 2_000, 32 * KIB


def private_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_free_pages_below_a_block_in_use_are_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    full = private_kib()
    for block in blocks[:-1]:
        libc.free(block)
    kept = private_kib()
    give_back()
    given = private_kib()
    libc.free(blocks[-1])
    assert full - kept < BLOCKS * BLOCK / KIB / 2  # what free() alone gives back
    assert kept - given > BLOCKS * BLOCK / KIB / 2


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    give_back()
