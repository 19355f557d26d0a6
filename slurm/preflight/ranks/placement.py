# SPDX-License-Identifier: Apache-2.0
"""Reports of all ranks about themselves, and the checks that they form one job."""

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.machine import Machine, Rank
from slurm.preflight.node.gpus import VISIBLE, visible
from slurm.preflight.node.versions import HELD, ON_GPUS, installed
from slurm.preflight.requirements import Expected

TREE = Path(__file__).resolve().parents[3]
OWN = ("NCCL_HOSTID", "NCCL_TOPO_DUMP_FILE", "NCCL_DEBUG_FILE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME")
"""Variables that may differ: nodes of one cluster may have different device names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank: where it is, on which device, with which software."""

    host: str
    local_rank: int
    world_size: int
    device: str
    versions: dict[str, str]
    commit: str
    """Commit of this tree; empty outside of a git repository."""
    nccl: dict[str, str]
    """NCCL_* variables of its environment."""


def place_of(rank: Rank, machine: Machine) -> Place:
    """Return this rank's place."""
    listed = machine.environ.get(VISIBLE)
    devices = None if listed is None else visible(listed)
    device = str(rank.local_rank)
    if devices is not None:
        device = devices[rank.local_rank] if rank.local_rank < len(devices) else ""
    return Place(
        host=rank.host,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        device=device,
        versions={name: installed(name) or "none" for name in (*HELD, *ON_GPUS)},
        commit=_commit(),
        nccl={k: v for k, v in machine.environ.items() if k.startswith("NCCL_") and k not in OWN},
    )


def _commit() -> str:
    command = ["git", "-C", str(TREE), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def leaders(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each host, given the host of every rank."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return list(first.values())


def place_checks(
    expected: Expected, places: Sequence[Place], on_gpus: bool
) -> Iterator[PreflightCheck]:
    """Yield the checks of ranks: placed as expected, each on its own GPU, equal in software."""
    yield from _spread(expected, places)
    if on_gpus:
        yield from _devices(places)
    yield from _alike(places)


def _spread(expected: Expected, places: Sequence[Place]) -> Iterator[PreflightCheck]:
    sizes = sorted({place.world_size for place in places})
    if sizes != [len(places)]:
        yield PreflightCheck.failure(
            Group.RANKS, "world size", f"ranks report {', '.join(map(str, sizes))} ranks",
            "start all ranks by one launcher, with one WORLD_SIZE",
        )  # fmt: skip
    by_host: dict[str, list[tuple[int, int]]] = {}
    for rank, place in enumerate(places):
        by_host.setdefault(place.host, []).append((rank, place.local_rank))
    sizes_of = {host: len(here) for host, here in by_host.items()}
    counts = ", ".join(f"{host} has {count}" for host, count in sizes_of.items())
    if expected.ranks_per_node and set(sizes_of.values()) != {expected.ranks_per_node}:
        yield PreflightCheck.failure(
            Group.RANKS, "ranks a node", f"{counts}; {expected.ranks_per_node} expected on each",
            "set ranks a node in the launcher (--nproc-per-node, --ntasks-per-node)",
        )  # fmt: skip
    elif expected.nodes and len(by_host) != expected.nodes:
        yield PreflightCheck.failure(
            Group.RANKS, "ranks a node", f"{len(by_host)} nodes; {expected.nodes} expected",
            "set the nodes of the launcher",
        )  # fmt: skip
    else:
        shown = counts if len(by_host) <= 4 else f"{len(by_host)} nodes"
        yield PreflightCheck.ok(Group.RANKS, "ranks a node", shown)
    broken = [host for host, here in by_host.items() if not _in_order(here)]
    if broken:
        yield PreflightCheck.failure(
            Group.RANKS, "order of ranks",
            f"ranks of {', '.join(broken)} are not neighbours, or not in the order of local ranks",
            "number ranks node by node (srun --distribution=block): TP would leave the node",
        )  # fmt: skip


def _in_order(here: Sequence[tuple[int, int]]) -> bool:
    """Whether a host's (rank, local rank) are neighbours, and in the order of local ranks."""
    first = here[0][0]
    return list(here) == [(first + local, local) for local in range(len(here))]


def _devices(places: Sequence[Place]) -> Iterator[PreflightCheck]:
    taken = Counter((place.host, place.device) for place in places)
    shared = [
        f"ranks {', '.join(str(r) for r, p in enumerate(places) if (p.host, p.device) == where)} "
        f"are all on GPU {where[1]} of {where[0]}"
        for where, count in taken.items()
        if count > 1 and where[1]
    ]
    without = [rank for rank, place in enumerate(places) if not place.device]
    if without:
        shared.append(f"ranks {', '.join(map(str, without))} see no GPU of their own")
    if shared:
        yield PreflightCheck.failure(
            Group.RANKS, "one GPU a rank", "; ".join(shared),
            f"unset {VISIBLE}, and start at most one rank a GPU",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.RANKS, "one GPU a rank", f"{len(places)} ranks")


def _alike(places: Sequence[Place]) -> Iterator[PreflightCheck]:
    facts = [{**place.versions, **place.nccl, "commit": place.commit[:12]} for place in places]
    names = dict.fromkeys(name for fact in facts for name in fact)
    different = []
    for name in names:
        values = Counter(fact.get(name, "not set") for fact in facts)
        if len(values) > 1:
            usual = values.most_common(1)[0][0]
            odd = next(r for r, fact in enumerate(facts) if fact.get(name, "not set") != usual)
            different.append(
                f"{name} is {usual or 'none'}, but {facts[odd].get(name, 'not set') or 'none'} on "
                f"{places[odd].host} (rank {odd})"
            )
    if different:
        yield PreflightCheck.failure(
            Group.VERSIONS, "ranks alike", "; ".join(different),
            "start every rank from one container, one tree and one environment",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.VERSIONS, "ranks alike", "versions, commit and NCCL_* on all")
