# SPDX-License-Identifier: Apache-2.0
"""Checks of a node's links, by `nvidia-smi topo -m`, against the ranks that share them.

Words of the matrix, nearest first: NV# (NVLinks), PIX (one PCIe bridge), PXB (several), PHB (the
CPU's host bridge), NODE (between host bridges of a NUMA node), SYS (between NUMA nodes).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.machine import Machine
from slurm.preflight.node.gpus import VISIBLE, visible
from slurm.preflight.requirements import Expected

NEAR = ("PIX", "PXB")
ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")
_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|mlx5_\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Links between the devices of a node."""

    links: Mapping[tuple[str, str], str]
    """The word between two devices, both ways: ("GPU0", "NIC1") -> "PIX"."""
    nics: Mapping[str, str]
    """The name of each NIC: NIC0 -> mlx5_0."""

    @property
    def gpus(self) -> list[int]:
        """The GPUs of the matrix."""
        return sorted({int(one[3:]) for one, _ in self.links if one.startswith("GPU")})

    def between(self, one: int, other: int) -> str:
        """Return the word between two GPUs; empty if the matrix lacks one of them."""
        return self.links.get((f"GPU{one}", f"GPU{other}"), "")

    def nearest(self, gpu: int) -> tuple[str, str] | None:
        """Return the nearest NIC of a GPU and its word; None if the matrix has no NIC."""
        words = {nic: self.links.get((f"GPU{gpu}", nic), "SYS") for nic in self.nics}
        known = [(ORDER.index(word), nic) for nic, word in words.items() if word in ORDER]
        return (self.nics[min(known)[1]], ORDER[min(known)[0]]) if known else None


def parsed(said: str) -> Topology:
    """Return the matrix; without devices if the text has none."""
    lines = _UNDERLINE.sub("", said).splitlines()
    nics = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), flags=re.MULTILINE))
    columns: list[str] = []
    links: dict[tuple[str, str], str] = {}
    for line in lines:
        words = line.split()
        if not words:
            continue
        if not columns and words[0] == "GPU0":
            columns = [word for word in words if _DEVICE.fullmatch(word)]
            if len(words) > 1 and words[1] == "X":  # a row; the header was lost
                columns = []
        elif columns and words[0] in columns:
            links |= {
                (words[0], other): word
                for other, word in zip(columns, words[1:], strict=False)
                if word in ORDER or re.fullmatch(r"X|NV\d+", word)
            }
    for name in columns:  # before driver 515 the columns have the names themselves
        if name.startswith("mlx5"):
            nics[name] = name
    return Topology(links=links, nics=nics)


def topology_checks(expected: Expected, machine: Machine) -> Iterator[PreflightCheck]:
    """Yield the checks of NVLink and NICs; none if no GPU is expected or there is no matrix."""
    if not expected.gpus_per_node:
        return
    said = machine.run(["nvidia-smi", "topo", "-m"])
    found = parsed(said) if said is not None else None
    if found is None or not found.gpus:
        yield PreflightCheck.warning(
            Group.TOPOLOGY, "topology", "nvidia-smi topo -m does not answer",
            "look at the links of the node by hand",
        )  # fmt: skip
        return
    yield from _fast_links(expected, found, device_order(expected, machine))
    if expected.nodes > 1:
        yield from _nics(found)


def device_order(expected: Expected, machine: Machine) -> list[int]:
    """Return the GPU of each local rank, by CUDA_VISIBLE_DEVICES if it has enough numbers."""
    said = visible(machine.environ.get(VISIBLE, ""))
    ranks = expected.ranks_per_node or expected.gpus_per_node
    if len({int(word) for word in said if word.isdigit()}) == len(said) >= ranks:
        return [int(word) for word in said][:ranks]
    return list(range(ranks))


def _fast_links(expected: Expected, found: Topology, order: list[int]) -> Iterator[PreflightCheck]:
    """Yield a check for TP, and one for the all-to-all of the ranks around it."""
    ranks = len(order)
    stride, groups = 1, (("TP", expected.tp), ("CP all-to-all", expected.ulysses))
    for kind, size in groups:
        span = stride * size
        if size == 1:
            continue
        name = f"{kind} {size}"
        state = PreflightCheck.failure if kind == "TP" else PreflightCheck.warning
        slow = [
            f"local ranks {a} and {b} (GPU{order[a]}, GPU{order[b]}) by "
            f"{found.between(order[a], order[b])}"
            for a in range(ranks)
            for b in range(a + 1, ranks)
            if a // span == b // span and a % stride == b % stride
            if found.between(order[a], order[b]) in ORDER
        ]
        if slow:
            more = f" and {len(slow) - 1} more pairs" if len(slow) > 1 else ""
            yield state(
                Group.TOPOLOGY, name, f"without NVLink: {slow[0]}{more}",
                f"order CUDA_VISIBLE_DEVICES by NVLink, or choose a smaller {kind}",
            )  # fmt: skip
        elif ranks % span and max(ranks, expected.linked_gpus) % span:
            yield state(
                Group.TOPOLOGY, name,
                f"its groups of {span} ranks do not fit inside NVLink, on nodes of {ranks} ranks",
                f"choose a {kind} for which {kind} x the ranks inside it fits in {ranks}",
            )  # fmt: skip
        else:
            yield PreflightCheck.ok(Group.TOPOLOGY, name, f"NVLink joins each {span} neighbours")
        stride = span


def _nics(found: Topology) -> Iterator[PreflightCheck]:
    far = [
        f"GPU{gpu} {near[1]} to {near[0]}"
        for gpu in found.gpus
        if (near := found.nearest(gpu)) is not None and near[1] not in NEAR
    ]
    if not found.nics:
        yield PreflightCheck.warning(
            Group.TOPOLOGY, "NICs", "the node shows none",
            "mount /dev/infiniband into the container, or expect sockets between nodes",
        )  # fmt: skip
    elif far:
        yield PreflightCheck.warning(
            Group.TOPOLOGY, "NICs", f"none near: {', '.join(far)}",
            "check for a missing NIC: on a DGX, GPUs reach one by PIX or PXB",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.TOPOLOGY, "NICs", f"{len(found.nics)}, one near each GPU")
