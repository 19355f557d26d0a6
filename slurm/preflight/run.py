# SPDX-License-Identifier: Apache-2.0
"""Preflight as the first step of a job, on every rank, before the model is built."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.files.whole import write_text
from slurm.preflight.check import Check, Group, PreflightError, as_json, failures
from slurm.preflight.machine import Machine, Rank, rank_of
from slurm.preflight.node.checks import node_checks, world_checks
from slurm.preflight.node.filesystem import content_checks
from slurm.preflight.node.gpus import gpus, visible_checks
from slurm.preflight.requirements import Expected

RECORD = "preflight.json"
SECONDS = 30.0
"""What the measurements of links may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What was found of a job, or of this machine where this process is no rank of one."""

    checks: list[Check]
    nodes: tuple[str, ...]
    """All nodes of the job; of a rank that could not meet the others its own."""
    met: bool = True
    """Whether this rank has met all others."""
    shown: bool = True
    """Whether it is for this process to show: for rank 0, and for a rank that met nobody."""


def preflight(expected: Expected, *, seconds: float = SECONDS) -> None:
    """Look at this rank's machine and at all ranks together; return where nothing failed.

    Rank 0 writes the page to `preflight.json` of the run folder. Raises PreflightError with every
    failure and the job's nodes, alike on all ranks that could meet; one that could not has its own
    failure to show. torch.distributed is left as it was found.
    """
    page = all_checks(expected, Machine(), seconds=seconds)
    if failures(page.checks):
        raise PreflightError(page.checks, nodes=page.nodes, met=page.met)


def all_checks(expected: Expected, machine: Machine, *, seconds: float) -> Page:
    """Return the page of the job where this process is a rank of one, else of this machine."""
    rank = rank_of(machine)
    if rank is None:
        checks = [*node_checks(expected, machine, None), *content_checks(expected)]
        page = Page(checks=checks, nodes=(machine.host,))
    else:
        page = _of_job(expected, machine, rank, seconds)
    if expected.run_folder is not None and (rank is None or rank.rank == 0):
        _write(expected.run_folder, page.checks)
    return page


def _of_job(expected: Expected, machine: Machine, rank: Rank, seconds: float) -> Page:
    """Return the page of the job; of this rank where it could not meet all others."""
    from slurm.preflight.ranks.checks import rank_checks
    from slurm.preflight.ranks.rendezvous import meet

    own = list(world_checks(expected, rank))
    if rank.local_rank == 0:
        own += node_checks(expected, machine, rank)
    else:
        own += visible_checks(expected, machine, gpus(machine))
    try:
        meeting = meet(rank, expected.meet_seconds)
        found, nodes = rank_checks(expected, machine, meeting, own, seconds=seconds)
        meeting.all("done", True)  # rank 0, who may keep the store, leaves last
        return Page(checks=found, nodes=nodes, shown=rank.rank == 0)
    except PreflightError as error:
        return Page(checks=[*own, *error.checks], nodes=(rank.host,), met=False)
    except RuntimeError as error:  # what torch's store raises derives from it
        lost = Check.failure(
            Group.RANKS, "ranks",
            f"a rank stopped answering {rank.host} (rank {rank.rank}): "
            f"{str(error).strip().splitlines()[0]}",
            "look at the output of the other ranks for the first that ended",
        )  # fmt: skip
        return Page(checks=[*own, lost], nodes=(rank.host,), met=False)


def _write(folder: Path, checks: list[Check]) -> None:
    """Write the page; a folder that cannot be written to is on the page."""
    with suppress(OSError):
        write_text(folder / RECORD, as_json(checks) + "\n")
