# SPDX-License-Identifier: Apache-2.0
"""What a job needs of its machines; what is not stated is not checked; light."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from custom_modules.context_parallel.config import ContextParallelKind
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Layout
from recipes.spec.units import GiB

if TYPE_CHECKING:
    from slurm.cluster_file import ClusterFile

MEMORY_SHARE = 0.98
"""Of a cluster file's GPU memory: drivers keep some hundred MiB, and differ in how many."""
SHARED_MEMORY_GIB = 8.0
"""Of /dev/shm, for NCCL between the ranks of a node and for data loaders; Docker gives 64 MB."""
HCA = "NCCL_IB_HCA"
CONNECTIONS_FREE_FROM = (10, 0)
"""Megatron-LM asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with TP or CP on GPUs before Blackwell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Least speeds of the links, GB/s a GPU in one direction, by the cluster file."""

    nvlink_gbps: float
    network_gbps: float
    warned_below: float = 0.7
    """Share of what the links allow; ours: healthy links give collectives about 0.8."""
    failed_below: float = 0.4
    """Less than this is a link, a NIC or a route missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the job needs; 0, empty and None stand for not stated."""

    world_size: int = 0
    nodes: int = 0
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    linked_gpus: int = 0
    """GPUs that NVLink joins, where it spans several nodes; 0: those of a node."""
    gpu_memory_gib: float = 0
    least_driver: str = ""
    """As `535.104`; versions compare by their numbers."""
    least_sm_clock_mhz: int = 0
    capability: tuple[int, int] | None = None
    """CUDA's compute capability: whether CUDA_DEVICE_MAX_CONNECTIONS matters."""
    tp: int = 1
    cp: int = 1
    ulysses: int = 1
    """Ranks of the inner all-to-all of context parallelism."""
    megatron_fsdp: bool = False
    """It wants CUDA_DEVICE_MAX_CONNECTIONS other than 1."""
    host_bytes_per_rank: float = 0
    """Pinned for offload by each rank of a node."""
    host_reserve_gib: float = 8.0
    """Of a node, beside what its ranks pin."""
    shared_memory_gib: float = 0
    """Least size of /dev/shm."""
    run_folder: Path | None = None
    """Written by every node, and the same one on each."""
    checkpoint_folder: Path | None = None
    """Written by every node; it may be a link to another file system than the run folder's."""
    store: Path | None = None
    """Read by every node."""
    verify: str = "sampled"
    """How much of the store is compared with what was written: none, sampled or whole."""
    least_write_mbps: float = 0
    """MB/s of one node writing and syncing to the run folder; below it is a warning."""
    free_gib: float = 0
    """Room that the run folder's file system must have, for checkpoints."""
    hca: str = ""
    """What NCCL_IB_HCA must be."""
    bandwidth: Bandwidth | None = None
    versions: bool = True
    """Hold the installed versions to our pins."""
    clock_skew_seconds: float = 1.0
    slow_warned: float = 1.3
    """How many times slower than the median rank is worth a warning."""
    slow_failed: float = 2.0
    """How many times slower than the median rank is a failure."""
    meet_seconds: float = 300.0
    """How long ranks wait for each other to start: containers start minutes apart."""

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        layout: Layout | None = None,
        *,
        nodes: int = 0,
        ulysses: int = 0,
        host_bytes_per_rank: float = 0,
    ) -> "Expected":
        """Return what a layout on so many nodes of a cluster needs.

        Without nodes, those that the layout fills. `ulysses` is the inner degree where the layout
        leaves it to `auto`, as `Job.degrees` works it out. Raises ValueError where the layout's
        ranks do not spread evenly over the nodes.
        """
        machine = cls(
            nodes=nodes,
            world_size=nodes * cluster.gpus_per_node,
            ranks_per_node=cluster.gpus_per_node if nodes else 0,
            gpus_per_node=cluster.gpus_per_node,
            linked_gpus=cluster.gpus_per_link,
            gpu_memory_gib=MEMORY_SHARE * cluster.gpu.memory_gib,
            capability=cluster.gpu.capability,
            shared_memory_gib=SHARED_MEMORY_GIB,
            bandwidth=Bandwidth(nvlink_gbps=cluster.nvlink_gbps, network_gbps=cluster.network_gbps),
        )
        if layout is None:
            return machine
        ranks = layout.world_size
        nodes = nodes or -(-ranks // cluster.gpus_per_node)
        if ranks % nodes:
            raise ValueError(
                f"the layout has {ranks} ranks, which do not divide evenly over {nodes} nodes; set "
                "--nodes to a divisor of them, or dp in the layout"
            )
        of_layout = replace(
            machine,
            nodes=nodes,
            world_size=ranks,
            ranks_per_node=ranks // nodes,
            gpus_per_node=ranks // nodes,
            tp=layout.tp,
            cp=layout.cp.size,
            ulysses=ulysses or inner_degree(layout.cp.how, layout.cp.size),
            megatron_fsdp=layout.sharding in ("gradients", "parameters"),
            host_bytes_per_rank=host_bytes_per_rank or layout.offload.cap_gib * GiB,
        )
        if layout.device == "cuda":
            return of_layout
        return replace(
            of_layout,
            gpus_per_node=0,
            gpu_memory_gib=0,
            capability=None,
            shared_memory_gib=0,
            bandwidth=None,
        )


def thresholds(file: "ClusterFile") -> dict[str, Any]:
    """Return the fields of Expected that a cluster file states beside its hardware."""
    said = file.preflight
    return {
        "least_driver": said.least_driver,
        "least_sm_clock_mhz": said.least_sm_clock_mhz,
        "least_write_mbps": said.least_write_mbps,
        "free_gib": said.free_gib,
        "slow_warned": said.slow_warned,
        "slow_failed": said.slow_failed,
        "hca": str(file.environment.get(HCA, "")),
    }


def inner_degree(how: ContextParallelKind, size: int) -> int:
    """Return the ranks of the all-to-all by the kind alone; 1 for `auto`, which needs the model."""
    if how.kind in ("ulysses", "head_chunked", "a2a"):
        return size
    return int(how.ulysses or 1)
