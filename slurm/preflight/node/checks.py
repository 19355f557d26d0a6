# SPDX-License-Identifier: Apache-2.0
"""The checks of one node by itself; only three of them import torch."""

from collections.abc import Iterator

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.machine import Machine, Rank
from slurm.preflight.node.filesystem import WRITTEN, folder_checks
from slurm.preflight.node.gpu_software import engine_checks
from slurm.preflight.node.gpus import connection_checks, gpu_checks, gpus, visible_checks
from slurm.preflight.node.host import host_checks
from slurm.preflight.node.network import hca_checks, nccl_checks
from slurm.preflight.node.topology import topology_checks
from slurm.preflight.node.versions import version_checks
from slurm.preflight.requirements import Expected


def node_checks(
    expected: Expected, machine: Machine, rank: Rank | None, written: int = WRITTEN
) -> Iterator[PreflightCheck]:
    """Yield the checks of this node; one rank makes them for all of its ranks."""
    found = gpus(machine)
    yield from gpu_checks(expected, found)
    yield from visible_checks(expected, machine, found)
    yield from connection_checks(expected, machine)
    yield from topology_checks(expected, machine)
    yield from version_checks(expected)
    yield from engine_checks(expected)
    yield from host_checks(expected, machine)
    yield from folder_checks(expected, machine.host if rank is None else rank.host, written)
    yield from nccl_checks(expected)
    yield from hca_checks(expected, machine)


def world_checks(expected: Expected, rank: Rank) -> Iterator[PreflightCheck]:
    """Yield the check of the world size that the launcher gave this rank."""
    if not expected.world_size:
        return
    if rank.world_size != expected.world_size:
        yield PreflightCheck.failure(
            Group.RANKS, "world size",
            f"{rank.world_size} ranks; the layout has {expected.world_size}",
            "start as many ranks as TP x CP x PP x DP: set nodes and ranks a node in the launcher, "
            "or dp in the layout",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.RANKS, "world size", f"{rank.world_size} ranks")
