# SPDX-License-Identifier: Apache-2.0
"""Requirements of a job on its machines; only stated ones are checked."""

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
"""Least share of a cluster file's GPU memory: drivers reserve some hundred MiB, varying."""
SHARED_MEMORY_GIB = 8.0
"""Size of /dev/shm, for NCCL within a node and for data loaders; Docker's default is 64 MB."""
HCA = "NCCL_IB_HCA"
CONNECTIONS_FREE_FROM = (10, 0)
"""Megatron-LM needs CUDA_DEVICE_MAX_CONNECTIONS=1 with TP or CP on GPUs before Blackwell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Least speeds of the links, GB/s a GPU in one direction, by the cluster file."""

    nvlink_gbps: float
    network_gbps: float
    warned_below: float = 0.7
    """Share of what the links allow; Longhaul's choice: healthy links reach about 0.8."""
    failed_below: float = 0.4
    """Less than this means that a link, a NIC or a route is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Requirements of the job; 0, empty and None mean not stated."""

    world_size: int = 0
    nodes: int = 0
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    linked_gpus: int = 0
    """GPUs that NVLink joins if it spans several nodes; 0: those of a node."""
    gpu_memory_gib: float = 0
    least_driver: str = ""
    """Such as `535.104`; versions compare by their numbers."""
    least_sm_clock_mhz: int = 0
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, which decides whether CUDA_DEVICE_MAX_CONNECTIONS matters."""
    tp: int = 1
    cp: int = 1
    ulysses: int = 1
    """Ranks of the inner all-to-all of context parallelism."""
    megatron_fsdp: bool = False
    """Whether Megatron FSDP is used: it needs CUDA_DEVICE_MAX_CONNECTIONS other than 1."""
    host_bytes_per_rank: float = 0
    """Pinned for offload by each rank of a node."""
    adam_unknown: bool = False
    """Whether ranks hold a share of Adam on the host that `host_bytes_per_rank` does not count."""
    host_reserve_gib: float = 8.0
    """Host memory of a node, in addition to what its ranks pin."""
    shared_memory_gib: float = 0
    """Least size of /dev/shm."""
    run_folder: Path | None = None
    """Written by every node, and the same folder on each."""
    checkpoint_folder: Path | None = None
    """Written by every node; it may be a link to another file system than the run folder's."""
    store: Path | None = None
    """Read by every node."""
    verify: str = "sampled"
    """How much of the store is verified: none, sampled or whole."""
    least_write_mbps: float = 0
    """MB/s of one node writing and syncing to the run folder; less is a warning."""
    free_gib: float = 0
    """Free space that the run folder's file system must have, for checkpoints."""
    hca: str = ""
    """Required value of NCCL_IB_HCA."""
    bandwidth: Bandwidth | None = None
    versions: bool = True
    """Whether to check the installed versions against the pins."""
    clock_skew_seconds: float = 1.0
    slow_warned: float = 1.3
    """Slowdown against the median rank that is a warning."""
    slow_failed: float = 2.0
    """Slowdown against the median rank that is a failure."""
    meet_seconds: float = 300.0
    """Seconds that ranks wait for each other to start: containers start minutes apart."""

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
        """Return the requirements of a layout on nodes of a cluster.

        Without `nodes`, the layout determines them. `ulysses` is the inner degree if the layout
        leaves it to `auto`, as computed by `Workload.degrees`. Without `host_bytes_per_rank`, the
        offload's cap counts, which is that of activations. Raises ValueError if the ranks do not
        divide evenly over the nodes.
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
            adam_unknown=layout.optimizer_offload > 0 and not host_bytes_per_rank,
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
    """Return the fields of Expected that a cluster file states in addition to its hardware."""
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


def folder_at(*, path: str) -> Path:
    """Return a folder that a tree of nemo-run states as text.

    `Path` itself takes it by position only, and fiddle 0.3.0, the last release for Python 3.10,
    cannot compare trees with such arguments.
    """
    return Path(path)


def inner_degree(how: ContextParallelKind, size: int) -> int:
    """Return the ranks of the all-to-all by the kind alone; 1 for `auto`, which needs the model."""
    if how.kind in ("ulysses", "head_chunked", "a2a"):
        return size
    return int(how.ulysses or 1)
