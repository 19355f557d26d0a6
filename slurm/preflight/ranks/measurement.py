# SPDX-License-Identifier: Apache-2.0
"""The measurement of the links: on GPUs in a process of its own, which no other work shares.

PyTorch's monitor of NCCL, which writes the flight recorder's file when a collective hangs, watches
over the first group of a process alone. In a process that has closed a group before, training's
would have none. The process also takes NCCL's buffers and CUDA's context with it, and one that
hangs in a kernel can be ended without the rank.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from slurm.preflight.check import Group
from slurm.preflight.machine import Rank
from slurm.preflight.ranks.rendezvous import Meeting, joined, unless_done
from slurm.preflight.ranks.timings import Bench, Sizes

TIMES = "times"
"""Key of the store under which each rank writes its `Times` as a mapping, or why it has none."""
BESIDE = 120.0
"""Seconds for NCCL to connect all ranks, in addition to those of the measurements."""
ENDED_AFTER = 30.0
"""Seconds after torch's own limit, whose error says more, at which the process ends itself."""
WAITED = "a rank or a link did not answer"
"""Reason written by a rank that is not the cause of the failure."""
TREE = Path(__file__).resolve().parents[3]
STARTING = 120.0
"""Seconds for a process to import torch, from a slow file system too, and to end."""


def measured(
    meeting: Meeting, hosts: list[str], seconds: float, sizes: Sizes, *, on_gpus: bool
) -> list[dict[str, Any] | str]:
    """Return on rank 0 every rank's `Times` as a mapping, or why it has none; [] on other ranks.

    A process of its own measures where ranks are on GPUs, unless torch.distributed has a default
    group already, which then serves.
    """
    if on_gpus and not dist.is_initialized():
        measure_apart(meeting, hosts, seconds, sizes, on_gpus=on_gpus)
    else:
        times = _times(meeting, hosts, seconds, sizes, _limit(seconds), on_gpus=on_gpus)
        meeting.say(TIMES, times)
    return patient(meeting, seconds).gathered(TIMES)


def patient(meeting: Meeting, seconds: float) -> Meeting:
    """Return the meeting for after a measurement: the process of another rank may end much later.

    `seconds` is the time limit of the measurement.
    """
    return replace(meeting, seconds=meeting.seconds + _most(meeting, seconds))


def measure_apart(
    meeting: Meeting, hosts: list[str], seconds: float, sizes: Sizes, *, on_gpus: bool
) -> None:
    """Measure in a process of its own, which writes the times; write why if it does not."""
    given = {
        "rank": asdict(meeting.rank),
        "prefix": meeting.prefix,
        "meeting_seconds": meeting.seconds,
        "hosts": hosts,
        "seconds": seconds,
        "sizes": asdict(sizes),
        "limit": _limit(seconds),
        "on_gpus": on_gpus,
    }
    most = _most(meeting, seconds)
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(given),
            text=True,
            check=False,
            timeout=most,
            cwd=TREE,  # `-m` imports from its working folder first, and a user's may have data.py
            env=_environment(),
        )
        why = _ending(done.returncode)
    except subprocess.TimeoutExpired:
        why = f"its measurement did not end within {most:.0f} s"
    if not meeting.has_said(TIMES):
        meeting.say(TIMES, why)


def _environment() -> dict[str, str]:
    """Return the variables of a process that measures, without those that debug communication.

    Comparing and logging collectives would be measured as slow links.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_DEBUG")}
    return own | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_DISTRIBUTED_DEBUG": "OFF"}


def main() -> None:
    """Measure as the process that `_apart` starts, by what it writes to standard input."""
    given = json.load(sys.stdin)
    rank = Rank(**given["rank"])
    meeting = joined(rank, given["prefix"], given["meeting_seconds"])
    bench = given["hosts"], given["seconds"], Sizes(**given["sizes"])
    try:
        meeting.all("started", True)  # importing torch does not count against the collectives
        meeting.decided("all started", True)
    except RuntimeError as error:
        meeting.say(TIMES, f"{WAITED}: {_first_line(error)}")
        return
    meeting.say(TIMES, _times(meeting, *bench, given["limit"], on_gpus=given["on_gpus"]))


def _ending(code: int) -> str:
    """Return how a process ended that has written no times."""
    if code in (Group.SPEED, -signal.SIGABRT):  # ours, or that of NCCL's watchdog
        return f"{WAITED}, or NCCL failed: its output says which"
    if code < 0:
        return f"its measurement was ended by {signal.Signals(-code).name}"
    return f"its measurement ended with exit code {code}"


def _most(meeting: Meeting, seconds: float) -> float:
    """Return the seconds that a process of its own may take."""
    return meeting.seconds + _limit(seconds) + ENDED_AFTER + STARTING


def _limit(seconds: float) -> float:
    """Return the seconds after which a collective counts as hanging."""
    return BESIDE + 2 * seconds


def _times(
    meeting: Meeting,
    hosts: list[str],
    seconds: float,
    sizes: Sizes,
    limit: float,
    *,
    on_gpus: bool,
) -> dict[str, Any] | str:
    """Return this rank's measurements, or why a collective failed or hung for `limit` seconds."""
    rank = meeting.rank
    device = torch.device("cuda", rank.local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    try:
        with _ended(rank.rank, rank.host, limit), _group(meeting, on_gpus, limit):
            times = _benched(device, hosts, seconds, sizes)
            meeting.all("measured", True)  # a group must not close while another rank uses it
            meeting.decided("all measured", True)
            return times
    except RuntimeError as error:
        return _first_line(error)
    finally:
        if on_gpus:
            torch.cuda.empty_cache()


def _benched(
    device: torch.device, hosts: list[str], seconds: float, sizes: Sizes
) -> dict[str, Any] | str:
    try:
        return asdict(Bench(device, sizes, seconds).times(hosts))
    except RuntimeError as error:
        return _first_line(error)


def _first_line(error: RuntimeError) -> str:
    """Return the message of gloo, NCCL or the store; their errors derive from RuntimeError."""
    return str(error).strip().splitlines()[0]


@contextmanager
def _group(meeting: Meeting, on_gpus: bool, limit: float) -> Iterator[None]:
    """Make torch.distributed's default group inside this context, under its own keys."""
    if dist.is_initialized():  # the caller's, which the caller closes
        yield
        return
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=PrefixStore("group", meeting.store),
        rank=meeting.rank.rank,
        world_size=meeting.rank.world_size,
        timeout=timedelta(seconds=limit),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _ended(rank: int, host: str, limit: float) -> Iterator[None]:
    """End this process if the context does not end: a hanging NCCL kernel never returns."""

    def end() -> None:
        sys.stderr.write(
            f"preflight: rank {rank} on {host} has waited {limit:.0f} s in a collective; a rank or "
            "a link does not answer. Look at the ranks that do not say this.\n"
        )
        sys.stderr.flush()
        os._exit(Group.SPEED)

    with unless_done(limit + ENDED_AFTER, end):
        yield


if __name__ == "__main__":
    main()
