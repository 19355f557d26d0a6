# SPDX-License-Identifier: Apache-2.0
"""Preflight as the first step of a job, on every rank, before the model is built."""

from pathlib import Path

from slurm.preflight.check import Check, Group, PreflightError, as_json, failures
from slurm.preflight.expected import Expected
from slurm.preflight.gpus import gpus, visible_checks
from slurm.preflight.local import node_checks, world_checks
from slurm.preflight.machine import Machine, Rank, rank_of

RECORD = "preflight.json"
SECONDS = 30.0
"""What the measurements of links may take."""


def preflight(expected: Expected, *, seconds: float = SECONDS) -> None:
    """Look at this rank's machine and at all ranks together; return where nothing failed.

    Rank 0 writes the page to `preflight.json` of the run folder. Raises PreflightError with every
    failure, alike on all ranks that could meet. torch.distributed is left as it was found.
    """
    checks, _ = all_checks(expected, Machine(), seconds=seconds)
    if failures(checks):
        raise PreflightError(checks)


def all_checks(expected: Expected, machine: Machine, *, seconds: float) -> tuple[list[Check], bool]:
    """Return the page, and whether it is for this process to show.

    The page is of the job where this process is a rank of one, else of this machine. It is rank
    0's to show; a rank that could not meet the others has the failure that says why, to show too.
    """
    rank = rank_of(machine)
    if rank is None:
        checks, shown = list(node_checks(expected, machine, None)), True
    else:
        checks, met = _of_job(expected, machine, rank, seconds)
        shown = rank.rank == 0 or not met
    if expected.run_folder is not None and (rank is None or rank.rank == 0):
        _write(expected.run_folder, checks)
    return checks, shown


def _of_job(
    expected: Expected, machine: Machine, rank: Rank, seconds: float
) -> tuple[list[Check], bool]:
    """Return the checks of the job, and whether this rank has met all others."""
    from slurm.preflight.meeting import meet
    from slurm.preflight.ranks import rank_checks

    own = list(world_checks(expected, rank))
    if rank.local_rank == 0:
        own += node_checks(expected, machine, rank)
    else:
        own += visible_checks(expected, machine, gpus(machine))
    try:
        meeting = meet(rank, expected.meet_seconds)
        found = rank_checks(expected, machine, meeting, own, seconds=seconds)
        meeting.all("done", True)  # rank 0, who may keep the store, leaves last
        return found, True
    except PreflightError as error:
        return [*own, *error.checks], False
    except RuntimeError as error:  # what torch's store raises derives from it
        lost = Check.failure(
            Group.RANKS, "ranks",
            f"a rank stopped answering {rank.host} (rank {rank.rank}): "
            f"{str(error).strip().splitlines()[0]}",
            "look at the output of the other ranks for the first that ended",
        )  # fmt: skip
        return [*own, lost], False


def _write(folder: Path, checks: list[Check]) -> None:
    """Write the page whole or not at all; a folder that cannot be written to is on the page."""
    part = folder / f"{RECORD}.part"
    try:
        part.write_text(as_json(checks) + "\n")
        part.rename(folder / RECORD)
    except OSError:
        return
