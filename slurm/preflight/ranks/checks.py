# SPDX-License-Identifier: Apache-2.0
"""The checks that need all ranks: rank 0 judges their reports, and all receive the result."""

import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm.preflight.check import Group, PreflightCheck, joined
from slurm.preflight.machine import Machine
from slurm.preflight.node.filesystem import awaited, content_checks
from slurm.preflight.ranks.clocks import clock_check, offset
from slurm.preflight.ranks.measurement import WAITED, measured, patient
from slurm.preflight.ranks.placement import Place, leaders, place_checks, place_of
from slurm.preflight.ranks.rendezvous import Meeting
from slurm.preflight.ranks.slow_ranks import speed_checks
from slurm.preflight.ranks.timings import ON_CPU, ON_GPU, Sizes
from slurm.preflight.requirements import Expected

SEEN_SECONDS = 20.0
"""Seconds that a file of another node may take to appear."""
STORE_SECONDS = 24 * 3600.0
"""Seconds that ranks wait for the first one to read a whole store, perhaps terabytes."""
SAMPLE_SECONDS = 3600.0
"""The same for a sample, which includes the whole index files."""


def rank_checks(
    expected: Expected,
    machine: Machine,
    meeting: Meeting,
    own: list[PreflightCheck],
    *,
    seconds: float,
    sizes: Sizes | None = None,
) -> tuple[list[PreflightCheck], tuple[str, ...]]:
    """Return the checks of the whole job and its nodes, the same on every rank.

    `own` are those of this rank's node, or of the rank alone. Links are measured for `seconds` if
    nothing has failed before. The state of torch.distributed is restored.
    """
    rows = meeting.all("rank", asdict(place_of(meeting.rank, machine)))
    hosts = meeting.decided("hosts", [row["host"] for row in rows])
    on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    found = _of_nodes(meeting, own, hosts)
    if meeting.rank.rank == 0:
        found += place_checks(expected, [Place(**row) for row in rows], on_gpus)
    found += _clocks(expected, meeting, hosts)
    found += _same_folder(expected, meeting, hosts)
    found += _content(expected, meeting)
    failed = any(check.state == "failure" for check in found)
    if not meeting.decided("go", meeting.rank.rank == 0 and not failed and seconds > 0):
        if seconds > 0 and meeting.rank.rank == 0:
            found.append(
                PreflightCheck.warning(
                    Group.SPEED,
                    "bandwidth",
                    "not measured, since another check failed",
                    "fix that, and run preflight again",
                )
            )
    else:
        chosen = sizes or (ON_GPU if on_gpus else ON_CPU)
        times = measured(meeting, hosts, seconds, chosen, on_gpus=on_gpus)
        if meeting.rank.rank == 0:
            found += _judged(expected, hosts, times)
        meeting = patient(meeting, seconds)
    rows = meeting.decided("page", [asdict(check) for check in found])
    return [PreflightCheck.from_json(row) for row in rows], tuple(dict.fromkeys(hosts))


def _of_nodes(
    meeting: Meeting, own: list[PreflightCheck], hosts: list[str]
) -> list[PreflightCheck]:
    """Return the checks of all nodes as one page, on rank 0; nothing on others."""
    by_node: dict[str, dict[tuple[Group, str], PreflightCheck]] = {}
    for rank, rows in enumerate(meeting.all("own", [asdict(check) for check in own])):
        checks = by_node.setdefault(hosts[rank], {})
        for check in map(PreflightCheck.from_json, rows):
            key = (check.group, check.name)
            if key not in checks or checks[key].state == "ok":  # the worst of a node's ranks
                checks[key] = check
    return joined({node: list(checks.values()) for node, checks in by_node.items()})


def _clocks(expected: Expected, meeting: Meeting, hosts: list[str]) -> list[PreflightCheck]:
    """Return the check of the nodes' clocks, on rank 0."""
    first = leaders(hosts)
    offsets = meeting.all("offset", offset(meeting, first))
    by_host = {hosts[rank]: offsets[rank] for rank in first if offsets}
    return list(clock_check(by_host, expected.clock_skew_seconds)) if offsets else []


def _same_folder(expected: Expected, meeting: Meeting, hosts: list[str]) -> list[PreflightCheck]:
    """Return the check, on rank 0, that every node reads what rank 0 writes to the run folder."""
    folder = expected.run_folder
    if folder is None:
        return []
    token = uuid.uuid4().hex
    name, token = meeting.decided("token", [f".preflight-{token}.token", token])
    path, mine = Path(folder) / name, meeting.rank.rank
    unwritten = _written(path, token) if mine == 0 else ""
    unwritten = meeting.decided("written", unwritten)
    why = None
    if not unwritten and mine in leaders(hosts):
        why = awaited(path, token, SEEN_SECONDS)
    whys = meeting.all("seen", why)
    if mine:
        return []
    path.unlink(missing_ok=True)
    if unwritten:
        return []  # reported by the check of the run folder
    blind = {hosts[rank]: why for rank, why in enumerate(whys) if why is not None}
    if blind:
        shown = ", ".join(f"{host} ({why})" for host, why in blind.items())
        few = 2 * len(blind) < len(leaders(hosts))  # otherwise rank 0's node may be the faulty one
        return [
            PreflightCheck.failure(
                Group.FILES,
                "shared folder",
                f"a file that rank 0 wrote to {folder} cannot be read by {shown}",
                "put the run folder on the shared file system, mounted at one path on all nodes",
                blind if few else (),
            )
        ]
    return [
        PreflightCheck.ok(Group.FILES, "shared folder", f"{folder} is one folder on every node")
    ]


def _content(expected: Expected, meeting: Meeting) -> list[PreflightCheck]:
    """Return the check, on rank 0, of the store's content; the others wait for it."""
    checks = list(content_checks(expected)) if meeting.rank.rank == 0 else []
    seconds = STORE_SECONDS if expected.verify == "whole" else SAMPLE_SECONDS
    replace(meeting, seconds=seconds).decided("store", True)
    return checks


def _written(path: Path, token: str) -> str:
    """Write the token; return why it cannot be written, empty if it can."""
    try:
        path.write_text(token)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _judged(expected: Expected, hosts: list[str], times: list[Any]) -> list[PreflightCheck]:
    broken = [f"rank {rank} on {hosts[rank]}: {row}" for rank, row in enumerate(times)
              if isinstance(row, str)]  # fmt: skip
    if broken:
        broken.sort(key=lambda row: WAITED in row)  # those that waited for another come last
        return [
            PreflightCheck.failure(
                Group.SPEED,
                "bandwidth",
                f"a collective failed: {'; '.join(broken[:4])}",
                "look at the first rank named, and at NCCL_DEBUG=INFO",
            )
        ]
    return list(speed_checks(expected, hosts, times))
