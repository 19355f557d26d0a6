# SPDX-License-Identifier: Apache-2.0
"""Checks of NCCL, its HCAs, and the port that ranks meet at; only NCCL's check imports torch.

NCCL_IB_HCA (NCCL's user guide, environment variables): names to use, separated by commas, each a
prefix of a name with an optional `:port`; a leading `=` matches whole names, `^` all others.
"""

import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.machine import Machine
from slurm.preflight.requirements import HCA, Expected


@dataclass(frozen=True, slots=True)
class HcaFilter:
    """NCCL_IB_HCA, parsed."""

    names: tuple[tuple[str, int | None], ...]
    """Name or its prefix, and the port."""
    exact: bool
    others: bool
    """Whether the filter is all HCAs but these."""

    @classmethod
    def parsed(cls, said: str) -> "HcaFilter":
        """Return the filter of a value of NCCL_IB_HCA."""
        found = re.fullmatch(r"(\^?)(=?)(.*)", said.strip())
        others, exact, listed = found.groups() if found else ("", "", "")
        parts = [part.strip().partition(":") for part in listed.split(",") if part.strip()]
        names = tuple((name, int(port) if port.isdigit() else None) for name, _, port in parts)
        return cls(names=names, exact=bool(exact), others=bool(others))

    def matching(self, name: str, there: list[str]) -> list[str]:
        """Return the HCAs that one name of the filter matches."""
        return [hca for hca in there if hca == name or (not self.exact and hca.startswith(name))]


def hca_checks(expected: Expected, machine: Machine) -> Iterator[PreflightCheck]:
    """Yield the check of NCCL_IB_HCA against the HCAs of the node; none without GPUs."""
    if not expected.gpus_per_node:
        return
    said = machine.environ.get(HCA, "")
    folder = machine.infiniband
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if expected.hca and said != expected.hca:
        yield PreflightCheck.failure(
            Group.NETWORK, "HCA", f"{HCA} is {said or 'not set'}; the cluster has {expected.hca}",
            f"set {HCA}={expected.hca} on every rank",
        )  # fmt: skip
    elif said:
        wrong, down = hca_faults(HcaFilter.parsed(said), there, folder)
        if wrong:
            shown = ", ".join(there) or "none"
            yield PreflightCheck.failure(
                Group.NETWORK, "HCA", f"{HCA}={said}: {wrong}",
                f"name HCAs of this node (it has: {shown}), or unset it: NCCL uses all",
            )  # fmt: skip
        elif down:
            yield PreflightCheck.warning(
                Group.NETWORK, "HCA", f"{HCA}={said}: {', '.join(down)}",
                "connect the ports that should be up, or name the others: NCCL skips these",
            )  # fmt: skip
        else:
            yield PreflightCheck.ok(Group.NETWORK, "HCA", f"{HCA}={said}")
    elif there:
        yield PreflightCheck.ok(Group.NETWORK, "HCA", f"{len(there)} ({', '.join(there)})")
    elif expected.nodes > 1:
        yield PreflightCheck.warning(
            Group.NETWORK, "HCA", "none: NCCL uses sockets between nodes",
            "mount /dev/infiniband into the container, or look at ibstat on the host",
        )  # fmt: skip


def hca_faults(wanted: HcaFilter, there: list[str], folder: Path) -> tuple[str, list[str]]:
    """Return the fault of a filter on this node (empty if it has none) and the HCAs that are down.

    NCCL skips ports that are down, and hosts have NICs without a cable: of the HCAs that a prefix
    matches, one must be up. An HCA given by its whole name must be up itself.
    """
    if wanted.others:
        left = [
            hca
            for hca in there
            if not any(wanted.matching(name, [hca]) for name, _ in wanted.names)
        ]
        return ("" if left or not there else "it leaves out every HCA"), []
    down: list[str] = []
    for name, port in wanted.names:
        matching = wanted.matching(name, there)
        if not matching:
            return f"no HCA is called {name}", []
        faults = {hca: _port_fault(folder / hca / "ports", port) for hca in matching}
        found = [f"{hca} {fault}" for hca, fault in faults.items() if fault]
        if faults.get(name):
            return f"{name} {faults[name]}", []
        if len(found) == len(matching):
            return ", ".join(found), []
        down += found
    return "", down


def _port_fault(ports: Path, port: int | None) -> str:
    """Return why an HCA cannot be used; empty if it can, or if its ports are unknown."""
    numbers = sorted(int(one.name) for one in ports.iterdir()) if ports.is_dir() else []
    if port is not None and numbers and port not in numbers:
        return f"has no port {port}"
    states = [_state(ports / str(one)) for one in numbers if port in (None, one)]
    if states and not any(state in ("ACTIVE", "") for state in states):
        return f"is {states[0].lower()}"
    return ""


def _state(port: Path) -> str:
    """Return the word of a file such as `4: ACTIVE`; empty if there is no file."""
    try:
        return (port / "state").read_text().partition(":")[2].strip()
    except OSError:
        return ""


def nccl_checks(expected: Expected) -> Iterator[PreflightCheck]:
    """Yield the check that torch has NCCL and sees the GPUs; none if no GPU is expected."""
    if not expected.gpus_per_node:
        return
    import torch

    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        yield PreflightCheck.failure(
            Group.NETWORK, "NCCL", f"torch {torch.__version__} has none",
            "install a torch built for CUDA, or run in the container",
        )  # fmt: skip
    elif not torch.cuda.is_available():
        yield PreflightCheck.failure(
            Group.NETWORK, "NCCL", f"torch {torch.__version__} sees no GPU",
            "update the driver to one of torch's CUDA, and look at CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    else:
        shown = ".".join(map(str, torch.cuda.nccl.version()))
        yield PreflightCheck.ok(Group.NETWORK, "NCCL", f"{shown}, CUDA {torch.version.cuda}")


def unreachable(address: str, port: int, seconds: float) -> str | None:
    """Return why a port cannot be connected to within `seconds`; None if it can."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(left, 10.0))).close()
            return None
        except socket.gaierror:
            why = "the name does not resolve"
        except ConnectionRefusedError:
            why = "the connection is refused: nothing listens there"
        except TimeoutError:
            why = "no answer: a firewall, or a network that does not route"
        except OSError as error:
            why = (error.strerror or str(error)).lower()
        if time.monotonic() + 0.2 > deadline:
            return why
        time.sleep(0.2)


def port_failure(address: str, port: int, why: str, host: str) -> PreflightCheck:
    """Return the failure of a node that cannot reach the port where ranks meet."""
    return PreflightCheck(
        group=Group.NETWORK,
        name="port",
        state="failure",
        said=f"{address}:{port} is out of reach, {why}",
        remedy="start rank 0 there, name its address as MASTER_ADDR, and open the port between "
        "nodes",
        nodes=(host,),
    )
