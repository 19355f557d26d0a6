# SPDX-License-Identifier: Apache-2.0
"""Plans: a layout with its predicted memory, time and cost."""

import math
from dataclasses import dataclass, replace

from recipes.planner.batch_size import MOST_ACCUMULATION
from recipes.planner.kernels import Kernels, kernels_on
from recipes.planner.memory import Memory, memory
from recipes.planner.time import Time, time
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Layout
from recipes.spec.units import GiB

HEADROOM = 0.04
"""Share of GPU memory that a plan leaves free, since the formulas are not exact."""
HOST_SHARE = 0.9
"""Share of host memory that offloaded activations and Adam may take."""
LEAST_MFU, FULL_HOST, LEAST_CAUSE = 0.4, 0.7, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Memory and time of one stage under one layout on one cluster."""

    workload: Workload
    cluster: Cluster
    memory: Memory
    time: Time

    @property
    def short(self) -> float:
        """Bytes that a GPU lacks; negative if more than the headroom is free."""
        return short(self.memory, self.cluster)[0]

    @property
    def host_short(self) -> float:
        """Bytes that a rank's share of the host lacks."""
        return short(self.memory, self.cluster)[1]

    @property
    def fits(self) -> bool:
        """Whether it fits GPU and host memory."""
        return self.short <= 0 and self.host_short <= 0

    @property
    def untried(self) -> tuple[str, ...]:
        """Parts of the layout that were not tried on GPUs, or failed there."""
        return untried(self.workload.layout)

    @property
    def gpus(self) -> int:
        """GPUs of the layout."""
        return self.workload.layout.world_size

    @property
    def host_bytes(self) -> int:
        """A rank's share of the host memory."""
        return self.cluster.host_bytes_per_rank

    @property
    def gathered_to_save(self) -> float:
        """Host bytes of a rank that Megatron-Core's distributed optimizer gathers for a checkpoint.

        Every rank gets the moments and fp32 weights of all parameters of its TP and PP rank. The
        other kinds of sharding gather nothing.
        """
        workload = self.workload
        return 12 * workload.most(workload.weights) * (workload.layout.sharding == "optimizer")

    def gpu_hours(self, tokens: float) -> float:
        """Return GPU-hours for a token budget."""
        return tokens / self.time.tokens_per_gpu_second / 3600

    def cost(self, tokens: float) -> float:
        """Return the price of a token budget; 0 if the cluster file has no price."""
        return self.gpu_hours(tokens) * self.cluster.price_per_gpu_hour

    @property
    def warnings(self) -> list[str]:
        """Sentences about a plan that fits but deserves attention."""
        found = []
        if self.workload.micro_batches > MOST_ACCUMULATION:
            change = (
                "a batch that more data ranks divide"
                if self.workload.micro_batches % 2
                else "more GPUs as data ranks"
            )
            found.append(
                f"{self.workload.micro_batches} micro-batches per step on each data rank; {change} "
                "would make a step faster"
            )
        if self.time.mfu < LEAST_MFU:
            found.append(f"MFU is {self.time.mfu:.0%}; {self._slowed_by()}")
        held = self.memory.host / self.host_bytes
        if held > FULL_HOST:
            found.append(
                f"the layout takes {held:.0%} of a rank's share of host memory "
                f"({self.memory.host / GiB:,.0f} of {self.host_bytes / GiB:,.0f} GiB); run nothing "
                "else there that needs much memory"
            )
        saving = self.memory.host + self.gathered_to_save
        if saving > self.host_bytes:
            found.append(
                f"saving a checkpoint takes {saving / GiB:,.0f} GiB of host memory a rank, more "
                f"than its {self.host_bytes / GiB:,.0f} GiB: {self.gathered_to_save / GiB:,.0f} "
                "GiB in addition, for the gathered Adam states and fp32 weights; the layout "
                "trains, but may not be able to save"
            )
        return found

    def _slowed_by(self) -> str:
        """Return the largest cost other than products and attention, or that there is none."""
        categories, step = self.time.categories, self.time.step
        worst, most = max(
            ((name, s) for name, s in categories.items() if name not in ("matmul", "attention")),
            key=lambda category: category[1],
        )
        if most > LEAST_CAUSE * step:
            return (
                f"after products and attention most time goes to {worst}, {most / step:.0%} of "
                "the step"
            )
        of_attention = categories["attention"] / step
        return (
            f"attention takes {of_attention:.0%} of the step, at the rates that its kernels reach "
            "on this GPU"
        )


FSDP = "Megatron FSDP"


def untried(layout: Layout) -> tuple[str, ...]:
    """Return the parts of a layout that were not tried on GPUs, or failed there."""
    parts = {
        FSDP: layout.sharding in ("gradients", "parameters"),
        "Adam on the host": layout.optimizer_offload > 0,
        "an interleaved pipeline": layout.vpp > 1,
    }
    return tuple(name for name, used in parts.items() if used)


def short(held: Memory, cluster: Cluster) -> tuple[float, float]:
    """Return the bytes that a GPU and a rank's share of the host lack; negative if free."""
    of_gpu = held.total - (1 - HEADROOM) * cluster.gpu_bytes
    return of_gpu, held.host - HOST_SHARE * cluster.host_bytes_per_rank


def plan(workload: Workload, cluster: Cluster, *, kernels: Kernels | None = None) -> Plan:
    """Return the plan of a workload on a cluster; `kernels` replace those of its GPUs."""
    return Plan(
        workload=workload,
        cluster=cluster,
        memory=memory(workload, kernels or kernels_on(cluster)),
        time=time(workload, cluster),
    )


def capped(workload: Workload, cluster: Cluster) -> Plan:
    """Return the plan of a workload with its host cap set to what it needs."""
    return with_host_cap(plan(workload, cluster))


def with_host_cap(found: Plan) -> Plan:
    """Return a plan with its host cap set to what it needs, to a tenth of a GiB."""
    layout, offload = found.workload.layout, found.workload.layout.offload
    if offload.tensors == "none":
        return found
    cap = math.ceil(found.memory.offloaded / GiB * 10 + 1) / 10
    with_cap = replace(layout, offload=replace(offload, cap_gib=cap))
    return replace(found, workload=replace(found.workload, layout=with_cap))


def host_cap(cluster: Cluster) -> float:
    """Return the GiB of host memory that a layout may take of a rank's share."""
    return HOST_SHARE * cluster.host_bytes_per_rank / GiB
