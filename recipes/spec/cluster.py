# SPDX-License-Identifier: Apache-2.0
"""GPUs, memory and links of one kind of machine, read from `slurm/clusters/*.yaml`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files.user_file import read_yaml
from recipes.spec.efficiency import Efficiency
from recipes.spec.memory_constants import MemoryConstants
from recipes.spec.reliability import Reliability
from recipes.spec.suggest import did_you_mean
from recipes.spec.units import GiB

FOLDER = Path(__file__).resolve().parents[2] / "slurm" / "clusters"
NO_HARDWARE = f"{{path}} has no mapping `hardware`; see {FOLDER / 'dgx_h100.yaml'}"
WITHOUT = ("local", "template")
"""Files without hardware to plan for: the local machine, and the template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU. Peaks are dense, without sparsity."""

    name: str
    memory_gib: float
    """Total memory that CUDA reports."""
    bf16_tflops: float
    fp8_tflops: float
    """0 without FP8 support."""
    memory_gbps: float
    """Memory bandwidth in GB/s."""
    capability: tuple[int, int]
    """CUDA's compute capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes of one kind and the links between them; link speeds in GB/s per GPU and direction."""

    name: str
    gpu: Gpu
    gpus_per_node: int
    """Per node as the scheduler counts it."""
    host_memory_gib: float
    """Per node."""
    nvlink_gbps: float
    """Between GPUs of a node; without NVLink what PCIe has."""
    network_gbps: float
    host_link_gbps: float
    """Pinned copies between a GPU and its host."""
    price_per_gpu_hour: float = 0.0
    """0 if not stated."""
    currency: str = ""
    """Of the price, such as USD."""
    gpus_per_link: int = 0
    """GPUs that NVLink joins if it spans several nodes; 0 for those of one node."""
    nodes_per_block: int = 0
    """Nodes that the network joins at its full rate, such as those below one switch; 0 for all."""
    block_gbps: float = 0.0
    """What a GPU has for messages to other blocks if all of its block send; 0 if not stated."""
    efficiency: Efficiency = Efficiency()
    """Fractions of these peaks that kernels reach; those of attention are the kernel's on this GPU
    unless stated."""
    memory: MemoryConstants = MemoryConstants()
    """Bytes of a GPU in addition to those of the formulas."""
    reliability: Reliability = Reliability()
    """Failures of nodes, and the rate that checkpoints are written at."""

    def __post_init__(self) -> None:
        """Raise ValueError for impossible sizes."""
        for name in (
            "gpus_per_node", "host_memory_gib", "nvlink_gbps", "network_gbps", "host_link_gbps",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"cluster {self.name}: {name} is {getattr(self, name)}; it must be positive, "
                    "and finite"
                )
        for name in ("memory_gib", "bf16_tflops", "memory_gbps"):
            if not 0 < getattr(self.gpu, name) < math.inf:
                raise ValueError(
                    f"cluster {self.name}: gpu {name} is {getattr(self.gpu, name)}; it must be "
                    "positive, and finite"
                )
        if self.gpus_per_link % self.gpus_per_node:
            raise ValueError(
                f"cluster {self.name}: gpus_per_link is {self.gpus_per_link}, not a multiple of "
                f"the {self.gpus_per_node} GPUs of a node"
            )
        if bool(self.nodes_per_block) != bool(self.block_gbps) or self.nodes_per_block < 0:
            raise ValueError(
                f"cluster {self.name}: nodes_per_block is {self.nodes_per_block} and block_gbps "
                f"{self.block_gbps:g}; state both, as positive numbers, or neither"
            )
        if not 0 <= self.block_gbps <= self.network_gbps:
            raise ValueError(
                f"cluster {self.name}: block_gbps is {self.block_gbps:g}; it must be between 0 and "
                f"network_gbps, {self.network_gbps:g}"
            )
        try:
            shares = self.efficiency.on(self.gpu.capability)
        except ValueError as error:
            raise ValueError(f"cluster {self.name}: {error}") from None
        object.__setattr__(self, "efficiency", shares)

    @property
    def linked_gpus(self) -> int:
        """GPUs that the fast link joins."""
        return self.gpus_per_link or self.gpus_per_node

    @property
    def block_gpus(self) -> int:
        """GPUs of a block of nodes; 0 if the network joins all nodes at its full rate."""
        return self.nodes_per_block * self.gpus_per_node

    def joins(self, ranks: int, world: int) -> bool:
        """Whether the fast link joins every group of `ranks` neighbouring ranks of `world`."""
        return world <= self.linked_gpus or self.linked_gpus % ranks == 0

    @property
    def gpu_bytes(self) -> int:
        """Memory of one GPU."""
        return int(self.gpu.memory_gib * GiB)

    @property
    def host_bytes_per_rank(self) -> int:
        """Host memory of a rank: a part of a node has that part of it."""
        return int(self.host_memory_gib * GiB / self.gpus_per_node)


def names() -> list[str]:
    """Return the names of the shipped clusters that state their hardware."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in WITHOUT)


def path_of(name: str) -> Path:
    """Return the file of a shipped name, or the given path; raise ValueError if it is neither."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if name == "template":
        raise ValueError(
            f"template is not a cluster; copy {path}, fill it in and name your copy by its path"
        )
    if not path.is_file() and Path(name).exists():
        kind = "a folder" if Path(name).is_dir() else "not a cluster file"
        raise ValueError(f"{name} is {kind}; a cluster is a name, or a file *.yaml or *.yml")
    if not path.is_file() and name.endswith((".yaml", ".yml")):
        there = sorted(each.name for each in path.parent.glob("*.y*ml"))
        near = (
            did_you_mean(path.name, there)
            if there
            else "`longhaul clusters` lists the shipped ones"
        )
        raise ValueError(f"there is no cluster file {name}; {near}")
    if not path.is_file():
        raise ValueError(f"no cluster is called {name!r}; {did_you_mean(name, names())}")
    return path


def content(path: Path) -> dict[str, Any]:
    """Return the content of a cluster file, with its name as the hardware's.

    Raises ValueError if it is not a YAML mapping.
    """
    found = read_yaml(path)
    if not isinstance(found, dict):
        kind = "empty" if found is None else f"a {type(found).__name__}"
        raise ValueError(
            f"{path} is {kind}, not a mapping; copy {FOLDER / 'template.yaml'} and fill it in"
        )
    if "hardware" in found and not isinstance(found["hardware"], dict):
        raise ValueError(NO_HARDWARE.format(path=path))
    found.get("hardware", {}).setdefault("name", path.stem)
    return found


def states_hardware(name: str) -> bool:
    """Return whether a cluster file, by its shipped name or path, states hardware to plan for."""
    return "hardware" in content(path_of(name))


def load(name: str) -> Cluster:
    """Return the cluster of a shipped name or a YAML file.

    Raises ValueError, with the nearest name, for an unknown one, and for a malformed file.
    """
    path = path_of(name)
    given = content(path)
    if "hardware" not in given:
        raise ValueError(NO_HARDWARE.format(path=path))
    from recipes.spec.schema import decode  # here: pydantic takes 0.1 s of CPU

    section = {"hardware": given["hardware"]}
    return decode(_Hardware, section, str(path), unlisted=("name",)).hardware


@dataclass(frozen=True)
class _Hardware:
    """The section of a cluster file that the planner needs."""

    hardware: Cluster


CLUSTER = "dgx_h100"
"""The default cluster."""
