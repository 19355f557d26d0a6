# SPDX-License-Identifier: Apache-2.0
"""Checks of a node's host: memory for offload, shared memory, process limits."""

import os
import resource
from collections.abc import Iterator

from recipes.spec.units import GiB
from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.machine import Machine
from slurm.preflight.requirements import Expected

LEAST_FILES = 4096
"""Open files: checkpoints and data loaders of 8 ranks take more than the usual 1024."""


def host_checks(expected: Expected, machine: Machine) -> Iterator[PreflightCheck]:
    """Yield the checks of the host's memory and limits for all ranks of the node."""
    ranks = max(1, expected.ranks_per_node)
    pinned = expected.host_bytes_per_rank * ranks
    if pinned:
        yield from _memory(pinned, ranks, expected.host_reserve_gib * GiB, machine.memory_left())
        yield from _locked(expected.host_bytes_per_rank)
    if expected.adam_unknown:
        yield PreflightCheck.warning(
            Group.HOST, "Adam on the host",
            "its share of host memory is not checked: it depends on the model's parameters",
            "compare the host memory of the model's `longhaul plan --layout` with the node's",
        )  # fmt: skip
    if expected.shared_memory_gib:
        yield from _shared(expected.shared_memory_gib, machine)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        yield PreflightCheck.warning(
            Group.HOST, "open files", f"a process may open {files} (up to {most} by itself)",
            f"ulimit -n {LEAST_FILES} or more",
        )  # fmt: skip


def _memory(pinned: float, ranks: int, reserve: float, left: int) -> Iterator[PreflightCheck]:
    needed = pinned + reserve
    said = f"{left / GiB:,.1f} GiB left"
    if left < needed:
        yield PreflightCheck.failure(
            Group.HOST, "host memory",
            f"{said}; {needed / GiB:,.1f} GiB needed: {pinned / ranks / GiB:,.1f} pinned by each "
            f"of {ranks} ranks, {reserve / GiB:,.1f} for the rest",
            "ask for the node's memory (sbatch --mem=0), lower the offload's cap_gib, or keep less",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(
            Group.HOST, "host memory", f"{said}, {needed / GiB:,.1f} GiB needed"
        )


def _locked(needed: float) -> Iterator[PreflightCheck]:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < needed:
        yield PreflightCheck.warning(
            Group.HOST, "locked memory",
            f"a process may lock {limit / GiB:,.2f} GiB; {needed / GiB:,.1f} GiB to be pinned",
            "ulimit -l unlimited (in Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
        )  # fmt: skip


def _shared(least: float, machine: Machine) -> Iterator[PreflightCheck]:
    folder = machine.shared_memory
    try:
        found = os.statvfs(folder)
    except OSError as error:
        yield PreflightCheck.failure(
            Group.HOST, "shared memory", f"{folder}: {error.strerror}", "mount a tmpfs there"
        )
        return
    size = found.f_blocks * found.f_frsize / GiB
    if size < least:
        yield PreflightCheck.failure(
            Group.HOST, "shared memory", f"{folder} has {size:,.1f} GiB; {least:,.1f} GiB needed",
            "start the container with a larger one (docker run --shm-size, or --ipc=host)",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.HOST, "shared memory", f"{folder} has {size:,.1f} GiB")
