# SPDX-License-Identifier: Apache-2.0
"""Preflight as the first step of a job, on every rank, before the model is built."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.files.whole import write_text
from slurm.preflight.check import Group, PreflightCheck, PreflightError, as_json, failures
from slurm.preflight.machine import Machine, Rank, rank_of
from slurm.preflight.node.checks import node_checks, world_checks
from slurm.preflight.node.filesystem import content_checks
from slurm.preflight.node.gpus import gpus, visible_checks
from slurm.preflight.requirements import Expected

RECORD = "preflight.json"
SECONDS = 30.0
"""Time limit of measuring links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Checks of a job, or of this machine if this process is not a rank of a job."""

    checks: list[PreflightCheck]
    nodes: tuple[str, ...]
    """All nodes of the job; its own if this rank could not reach the others."""
    met: bool = True
    """Whether this rank reached all others."""
    shown: bool = True
    """Whether this process shows the page: rank 0, and a rank that could not reach the others."""


def preflight(expected: Expected, *, seconds: float = SECONDS) -> None:
    """Check this rank's machine and all ranks together; return if nothing failed.

    Rank 0 writes the page to `preflight.json` of the run folder. Raises PreflightError with every
    failure and the job's nodes, the same on all ranks that could meet; a rank that could not shows
    its own failure. The state of torch.distributed is restored.
    """
    page = all_checks(expected, Machine(), seconds=seconds)
    if failures(page.checks):
        raise PreflightError(page.checks, nodes=page.nodes, met=page.met)


def all_checks(expected: Expected, machine: Machine, *, seconds: float) -> Page:
    """Return the page of the job if this process is one of its ranks, else of this machine."""
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
    """Return the page of the job; that of this rank if it could not reach all others."""
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
        meeting.all("done", True)  # rank 0, which may host the store, leaves last
        return Page(checks=found, nodes=nodes, shown=rank.rank == 0)
    except PreflightError as error:
        return Page(checks=[*own, *error.checks], nodes=(rank.host,), met=False)
    except RuntimeError as error:  # errors of torch's store derive from it
        lost = PreflightCheck.failure(
            Group.RANKS, "ranks",
            f"a rank stopped answering {rank.host} (rank {rank.rank}): "
            f"{str(error).strip().splitlines()[0]}",
            "look at the output of the other ranks for the first that ended",
        )  # fmt: skip
        return Page(checks=[*own, lost], nodes=(rank.host,), met=False)


def _write(folder: Path, checks: list[PreflightCheck]) -> None:
    """Write the page; an unwritable folder is reported on the page itself."""
    with suppress(OSError):
        write_text(folder / RECORD, as_json(checks) + "\n")
