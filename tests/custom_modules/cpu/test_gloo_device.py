# SPDX-License-Identifier: Apache-2.0
"""All gloo groups of a process share a device and its thread; what they send is as without."""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from custom_modules.cpu.gloo_device import one_gloo_device
from tests.ranks import run_ranks

GROUPS = 12
SECONDS = 30.0


def device_threads(least: int = 0) -> int:
    """Return how many threads of gloo's devices this process has, once there are `least`.

    A thread names itself when it first runs, which on a busy machine is later than its start.
    """
    end = time.monotonic() + SECONDS
    while True:
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        count = names.count("gloo_tcp_loop")
        if count >= least or time.monotonic() > end:
            return count
        time.sleep(0.01)


def sums(size: int) -> tuple[int, list[list[float]]]:
    """Make groups of all ranks and of pairs; return the device threads and what each sums."""
    rank = dist.get_rank()
    groups = [dist.new_group(list(range(size)), timeout=timedelta(minutes=1 + n)) for n in range(4)]
    pairs = [[first, first + 1] for first in range(0, size, 2)]
    groups += [group for pair in pairs if (group := _own(pair, rank)) is not None]
    found = []
    works = []
    for number, group in enumerate(groups):
        mine = torch.full((3,), float(rank + number), dtype=torch.float64)
        works.append(dist.all_reduce(mine, group=group, async_op=True))
        found.append(mine)
    for work in works:
        work.wait()
    return device_threads(1), [mine.tolist() for mine in found]


def _own(pair: list[int], rank: int) -> dist.ProcessGroup | None:
    group = dist.new_group(pair)
    return group if rank in pair else None


def test_groups_of_a_rank_have_one_thread_and_the_right_sums():
    for rank, (threads, found) in enumerate(run_ranks(sums, 4, 4)):
        assert threads == 1
        first = rank // 2 * 2
        assert found[:4] == [[6.0 + 4 * number] * 3 for number in range(4)]
        assert found[4:] == [[2 * first + 1 + 2 * 4] * 3]


def made(number: int, least: int = 1) -> int:
    """Make groups of this process alone; return the device threads while they are there."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            for _ in range(number):
                dist.new_group([0])
            return device_threads(least)
        finally:
            dist.destroy_process_group()


def in_a_child(work) -> int:
    """Return what `work` returns in a forked process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, str(work()).encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return int(said)


def test_the_sharing_ends_with_the_context():
    before = device_threads()
    with one_gloo_device(), one_gloo_device():
        assert made(GROUPS) <= before + 1
    kept = device_threads()
    assert made(GROUPS, kept + GROUPS + 1) == kept + GROUPS + 1


def test_a_forked_process_has_a_device_of_its_own():
    with one_gloo_device():
        made(1)
        assert in_a_child(lambda: made(GROUPS)) == 1
