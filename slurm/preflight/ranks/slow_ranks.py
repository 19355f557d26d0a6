# SPDX-License-Identifier: Apache-2.0
"""Checks of measured times: bandwidths against the links, and which rank or link is slow.

Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), S the bytes on a rank, t the time:

| | algorithm | bus |
| --- | --- | --- |
| all-reduce | S / t | S / t * 2 (n - 1) / n |
| all-to-all | S / t | S / t * (n - 1) / n |
| ring | S / t | S / t |

The bus bandwidth that the links allow, with N of NVLink and I of the network, GB/s a GPU in one
direction, on nodes of g ranks (racks, where NVLink spans them): within one node N. Over several, an
all-reduce min(N, g * I), since rings use the NICs of all ranks of a node; an all-to-all
min(N, I * (n - 1) / (n - g)), since the rest stays inside; a ring over neighbours I, since one rank
a node crosses. Not tested on GPUs.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.requirements import Bandwidth, Expected

GB = 1e9


def bus_share(kind: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth."""
    return {"all-reduce": 2 * (ranks - 1) / ranks, "all-to-all": (ranks - 1) / ranks}.get(kind, 1.0)


def allowed(kind: str, links: Bandwidth, ranks: int, linked: int) -> float:
    """Return the bus bandwidth in GB/s that the links allow if NVLink joins `linked` ranks."""
    if ranks <= linked:
        return links.nvlink_gbps
    crossing = {
        "all-reduce": links.network_gbps * linked,
        "all-to-all": links.network_gbps * (ranks - 1) / (ranks - linked),
    }
    return min(links.nvlink_gbps, crossing.get(kind, links.network_gbps))


def slower(times: Mapping[int, float], least: float) -> dict[int, float]:
    """Return the ranks `least` times slower than the median of the others, and how much."""
    ordered = sorted(times.values())
    found = {}
    for rank, took in times.items() if len(ordered) > 1 else ():
        usual = _median_without(ordered, bisect_left(ordered, took))
        if took >= least * usual:
            found[rank] = took / max(usual, 1e-12)
    return found


def _median_without(ordered: Sequence[float], left_out: int) -> float:
    """Return the median of sorted numbers but the one at an index, without a copy of them."""
    low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
    return sum(ordered[at + (at >= left_out)] for at in (low, high)) / 2


def speed_checks(
    expected: Expected, hosts: Sequence[str], times: Sequence[Mapping[str, object]]
) -> Iterator[PreflightCheck]:
    """Yield the checks of each rank's `Times`, as a mapping; `hosts` is the node of each."""
    yield from _own(expected, hosts, times)
    yield from _links(expected, hosts, times)
    yield from _collectives(expected, hosts, times)


def _own(
    expected: Expected, hosts: Sequence[str], times: Sequence[Mapping[str, object]]
) -> Iterator[PreflightCheck]:
    for key, name, remedy in (
        ("product", "slow rank (compute)", "look at clocks and temperature of its GPU; drain it"),
        ("copy", "slow rank (memory)", "look for another process on its GPU; drain the node"),
    ):
        own = {rank: _seconds(found[key]) for rank, found in enumerate(times)}
        yield _judged(expected, name, own, hosts, remedy)


def _links(
    expected: Expected, hosts: Sequence[str], times: Sequence[Mapping[str, object]]
) -> Iterator[PreflightCheck]:
    for key, name, remedy in (
        ("inside", "slow rank (links in its node)", "look at NVLink of its GPU: nvidia-smi nvlink"),
        ("across", "slow rank (network)", "look at its NIC, cable and switch: ibstat, perfquery"),
    ):
        pairs = {
            (rank, int(partner)): _seconds(took)
            for rank, found in enumerate(times)
            for partner, took in _mapping(found[key]).items()
        }
        # A healthy rank has one slow link, to the slow rank; the slow rank has no other kind.
        best: dict[int, float] = {}
        for (rank, _), took in pairs.items():
            best[rank] = min(took, best.get(rank, took))
        if not best:
            continue
        judged = _judged(expected, name, best, hosts, remedy)
        if judged.state == "ok":
            judged = _pair(expected, name, pairs, hosts) or judged
        yield judged


def _judged(
    expected: Expected, name: str, own: Mapping[int, float], hosts: Sequence[str], remedy: str
) -> PreflightCheck:
    """Return the check of one time of each rank against those of the others."""
    slow = slower(own, expected.slow_warned)
    if not slow:
        quickest, slowest = min(own.values()), max(own.values())
        return PreflightCheck.ok(
            Group.SPEED, name, f"none: {1e3 * quickest:.3g} to {1e3 * slowest:.3g} ms"
        )
    shown = ", ".join(
        f"rank {rank} on {hosts[rank]} takes {ratio:.1f} times as long as the median rank"
        for rank, ratio in sorted(slow.items(), key=lambda one: -one[1])
    )
    failed = max(slow.values()) >= expected.slow_failed
    state = PreflightCheck.failure if failed else PreflightCheck.warning
    least = expected.slow_failed if failed else expected.slow_warned
    nodes = {hosts[rank] for rank, ratio in slow.items() if ratio >= least}
    return state(Group.SPEED, name, shown, remedy, nodes)


def _pair(
    expected: Expected, name: str, pairs: Mapping[tuple[int, int], float], hosts: Sequence[str]
) -> PreflightCheck | None:
    """Return the check of the slowest link if no rank as a whole is slow; None if it is fine."""
    (one, other), took = max(pairs.items(), key=lambda found: found[1])
    ratio = took / max(median(pairs.values()), 1e-12)
    if (
        ratio < expected.slow_warned or len(pairs) < 4
    ):  # a single pair has nothing to be compared with
        return None
    said = (
        f"the link of rank {one} on {hosts[one]} and rank {other} on {hosts[other]} takes "
        f"{ratio:.1f} times as long as the median link"
    )
    state = PreflightCheck.failure if ratio >= expected.slow_failed else PreflightCheck.warning
    return state(
        Group.SPEED, name.replace("rank", "link"), said, "look at the path between them",
        {hosts[one], hosts[other]},
    )  # fmt: skip


def _collectives(
    expected: Expected, hosts: Sequence[str], times: Sequence[Mapping[str, object]]
) -> Iterator[PreflightCheck]:
    ranks = len(hosts)
    if ranks == 1:
        return
    linked = max(expected.linked_gpus, *Counter(hosts).values())
    for kind in _mapping(times[0]["collectives"]):
        slowest = max(_seconds(_mapping(found["collectives"])[kind]) for found in times)
        algorithm = _seconds(times[0]["message"]) / max(slowest, 1e-12) / GB
        bus = algorithm * bus_share(kind, ranks)
        said = f"{bus:.3g} GB/s bus, {algorithm:.3g} GB/s algorithm, {ranks} ranks"
        links = expected.bandwidth
        if links is None:
            yield PreflightCheck.ok(Group.SPEED, kind, said)
            continue
        most = allowed(kind, links, ranks, linked)
        said += f"; the links allow {most:.3g}"
        if bus >= links.warned_below * most:
            yield PreflightCheck.ok(Group.SPEED, kind, said)
            continue
        state = (
            PreflightCheck.failure if bus < links.failed_below * most else PreflightCheck.warning
        )
        yield state(
            Group.SPEED, kind, f"{said}, {links.warned_below:.0%} of it is usual",
            "look at the slow rank or link above; else at NCCL_DEBUG=INFO: which links and NICs "
            "it uses, and whether GPUDirect RDMA is on",
        )  # fmt: skip


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"a rank measured {value!r}, which is not a number")
    return float(value)


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a rank measured {value!r}, which is not a mapping")
    return value
