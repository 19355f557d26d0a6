# SPDX-License-Identifier: Apache-2.0
"""A layout with what it is predicted to cost."""

import math
from dataclasses import dataclass, replace

from recipes.planner.batch_size import MOST_ACCUMULATION
from recipes.planner.memory import FUSED, Kernels, Memory, memory
from recipes.planner.time import Time, time
from recipes.planner.workload import Job
from recipes.spec.cluster import Cluster
from recipes.spec.units import GiB

HEADROOM = 0.04
"""Of a GPU's memory that a plan leaves free, for what the formulas do not know."""
HOST_SHARE = 0.9
"""Of the host's memory that pinned buffers may take."""
LEAST_MFU, FULL_HOST, LEAST_CAUSE = 0.4, 0.7, 0.1


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
                f"{self.job.micro_batches} micro-batches a step on each data rank; more GPUs as "
                "data ranks would take a step faster"
            )
        if self.time.mfu < LEAST_MFU:
            found.append(f"MFU is {self.time.mfu:.0%}; {self._slowed_by()}")
        held = self.memory.host / self.cluster.host_bytes_per_gpu
        if held > FULL_HOST:
            found.append(
                f"pinned host memory is {held:.0%} of a rank's share of the node "
                f"({self.memory.host / GiB:,.0f} of {self.cluster.host_bytes_per_gpu / GiB:,.0f} "
                "GiB); nothing else of weight may run there"
            )
        return found

    def _slowed_by(self) -> str:
        """Return what of a step is neither products nor attention, or that nothing else is."""
        causes, step = self.time.causes, self.time.step
        worst, most = max(
            ((name, s) for name, s in causes.items() if name not in ("matmul", "attention")),
            key=lambda cause: cause[1],
        )
        if most > LEAST_CAUSE * step:
            return (
                f"beside products and attention most time goes to {worst}, {most / step:.0%} of "
                "the step"
            )
        of_attention = causes["attention"] / step
        return (
            f"attention takes {of_attention:.0%} of the step, at the rates that its kernels reach "
            "on this GPU"
        )


def short(held: Memory, cluster: Cluster) -> tuple[float, float]:
    """Return the bytes that a GPU lacks, and a rank's share of the host; negative: to spare."""
    of_gpu = held.total - (1 - HEADROOM) * cluster.gpu_bytes
    return of_gpu, held.host - HOST_SHARE * cluster.host_bytes_per_gpu


def plan(job: Job, cluster: Cluster, *, kernels: Kernels = FUSED) -> Plan:
    """Return what a job takes on a cluster."""
    return Plan(
        job=job,
        cluster=cluster,
        memory=memory(job, kernels),
        time=time(job, cluster),
    )


def capped(job: Job, cluster: Cluster) -> Plan:
    """Return the plan of a job whose host cap is set to what it needs, to a tenth of a GiB."""
    found, offload = plan(job, cluster), job.layout.offload
    if offload.tensors == "none":
        return found
    cap = math.ceil(found.memory.host / GiB * 10 + 1) / 10
    layout = replace(job.layout, offload=replace(offload, cap_gib=cap))
    return replace(found, job=replace(job, layout=layout))


def host_cap(cluster: Cluster) -> float:
    """Return the GiB of pinned memory that a rank may take."""
    return HOST_SHARE * cluster.host_bytes_per_gpu / GiB
