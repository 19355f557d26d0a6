# SPDX-License-Identifier: Apache-2.0
"""A layout with what it is predicted to cost."""

from dataclasses import dataclass

from recipes.batch import MOST_ACCUMULATION
from recipes.cluster import Cluster
from recipes.planner.efficiency import HOPPER, Efficiency
from recipes.planner.job import Job
from recipes.planner.memory import FUSED, Kernels, Memory, memory
from recipes.planner.time import Time, time
from recipes.units import GiB

HEADROOM = 0.04
"""Of a GPU's memory that a plan leaves free, for what the formulas do not know."""
HOST_SHARE = 0.9
"""Of the host's memory that pinned buffers may take."""
LEAST_MFU, FULL_HOST = 0.4, 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one stage takes under one layout on one cluster."""

    job: Job
    cluster: Cluster
    memory: Memory
    time: Time

    @property
    def short(self) -> float:
        """Bytes that a GPU lacks; negative where more than the headroom is left."""
        return short(self.memory, self.cluster)[0]

    @property
    def host_short(self) -> float:
        """Bytes that a rank's share of the host lacks."""
        return short(self.memory, self.cluster)[1]

    @property
    def fits(self) -> bool:
        """Whether GPU and host hold it."""
        return self.short <= 0 and self.host_short <= 0

    @property
    def gpus(self) -> int:
        """GPUs of the layout."""
        return self.job.layout.world_size

    def gpu_hours(self, tokens: float) -> float:
        """Return GPU-hours for a token budget."""
        return tokens / self.time.tokens_per_gpu_second / 3600

    def cost(self, tokens: float) -> float:
        """Return the price of a token budget; 0 where the cluster states none."""
        return self.gpu_hours(tokens) * self.cluster.price_per_gpu_hour

    @property
    def warnings(self) -> list[str]:
        """What fits and should be looked at."""
        found = []
        if self.job.micro_batches > MOST_ACCUMULATION:
            found.append(
                f"{self.job.micro_batches} micro-batches a step; more GPUs as data ranks, or a "
                "larger micro-batch, would take a step faster"
            )
        if self.time.mfu < LEAST_MFU:
            causes = self.time.causes
            worst = max((n for n in causes if n not in ("matmul", "attention")), key=causes.get)  # type: ignore[arg-type]
            found.append(
                f"MFU is {self.time.mfu:.0%}; beside products and attention most time goes to "
                f"{worst}, {causes[worst] / self.time.step:.0%} of the step"
            )
        held = self.memory.host / self.cluster.host_bytes_per_gpu
        if held > FULL_HOST:
            found.append(
                f"pinned host memory is {held:.0%} of a rank's share of the node "
                f"({self.memory.host / GiB:,.0f} of {self.cluster.host_bytes_per_gpu / GiB:,.0f} "
                "GiB); nothing else of weight may run there"
            )
        return found


def short(held: Memory, cluster: Cluster) -> tuple[float, float]:
    """Return the bytes that a GPU lacks, and a rank's share of the host; negative: to spare."""
    of_gpu = held.total - (1 - HEADROOM) * cluster.gpu_bytes
    return of_gpu, held.host - HOST_SHARE * cluster.host_bytes_per_gpu


def plan(
    job: Job, cluster: Cluster, *, kernels: Kernels = FUSED, efficiency: Efficiency = HOPPER
) -> Plan:
    """Return what a job takes on a cluster."""
    return Plan(
        job=job,
        cluster=cluster,
        memory=memory(job, kernels),
        time=time(job, cluster, efficiency),
    )
