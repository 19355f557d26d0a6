# SPDX-License-Identifier: Apache-2.0
"""Readers of this machine's state for the checks."""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 60
"""Time limit of a command; nvidia-smi takes seconds without persistence mode."""


def output_of(command: Sequence[str]) -> str | None:
    """Return the output of a command; None if it is missing, failed, or did not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SECONDS, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def host_memory_left() -> int:
    """Return the bytes that this machine, or its container, has left."""
    from custom_modules.memory.pinned_pool import host_memory_left as left  # it imports torch

    return left()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The readers that checks use; the defaults read this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str | None] = output_of
    memory_left: Callable[[], int] = host_memory_left
    host: str = field(default_factory=socket.gethostname)
    infiniband: Path = Path("/sys/class/infiniband")
    shared_memory: Path = Path("/dev/shm")  # noqa: S108  # looked at, never written to


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """The place of this process in a job."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    address: str
    port: int
    agent: bool
    """Whether the launcher (torchrun) hosts the store that ranks meet in."""
    restarts: int = 0
    """How often torchrun has restarted these ranks; its store outlives them."""


def rank_of(machine: Machine) -> Rank | None:
    """Return this process's place by torchrun's variables, else by srun's; None without either.

    Raises ValueError for a rank without an address or with invalid numbers.
    """
    environ = machine.environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        # A batch script has SLURM_PROCID too; only srun's tasks have the size of their step.
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return None
    try:
        rank, world_size, local_rank = (int(environ.get(name, "0")) for name in names)
        restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        address, port = _meeting_point(environ)
    except ValueError as error:
        raise ValueError(f"the variables of this rank are unreadable: {error}") from error
    return Rank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=environ.get("SLURMD_NODENAME", machine.host),
        address=address,
        port=port,
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=restarts,
    )


def _meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return address and port by their variables, else as Lightning derives them from Slurm's."""
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", "localhost"))
    address = environ.get("MASTER_ADDR") or first_node(nodes)
    port = environ.get("MASTER_PORT")
    job = environ.get("SLURM_JOB_ID", "0")
    return address, int(port) if port else int(job[-4:]) + 15000


def first_node(listed: str) -> str:
    """Return the first name of Slurm's list of nodes: `n[03-07,9],m1` is n03."""
    found = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", listed)
    return listed if found is None else found[1] + (found[2] or "")
