# SPDX-License-Identifier: Apache-2.0
"""Meaning of the out-of-memory errors in a log, compared with the plan of the layout that ran."""

from collections.abc import Iterator, Sequence

from longhaul.doctor.case import Case, gib
from longhaul.doctor.logs.kinds import ON_THE_GPU, ON_THE_HOST, SET_ALLOCATOR
from longhaul.doctor.logs.reader import Fault
from longhaul.doctor.logs.stated import Sizes
from recipes.planner.plan import HEADROOM, Plan
from recipes.planner.rank_groups import rank_map
from recipes.planner.tensor_sizes import matching
from recipes.spec.units import GiB

OF_NCCL = 1 * GiB
"""Bytes that NCCL is assumed to lack when it finds no memory; its log has none."""
FAR_BELOW, OTHER_GPU = 1.15, 0.05
"""Ratio that a prediction does not explain; relative difference of another GPU's capacity."""


def meanings(found: Case, fault: Fault) -> list[str]:
    """Return what a fault of memory means for a layout; nothing for other faults."""
    if fault.kind == "device":
        return list(_device(found, fault.sizes))
    if fault.kind == "nccl_memory":
        return list(_nccl(found))
    of_host = fault.kind in ON_THE_HOST and fault.kind != "shared"
    return list(_host(found, fault)) if of_host else []


def _device(found: Case, one: Sizes) -> Iterator[str]:
    plan = found.plan
    if one.asked is None:
        yield "the line has no sizes"
        return
    sizes = [f"{gib(one.asked)} asked for"]
    for size, words in (
        (one.allocated, "allocated by PyTorch"),
        (one.unallocated, "reserved by it and unused"),
        (one.free, "free"),
    ):
        if size is not None:
            sizes.append(f"{gib(size)} {words}")
    where = "" if one.gpu is None else f"GPU {one.gpu}: "
    capacity = "" if one.capacity is None else f", of {gib(one.capacity)}"
    yield f"{where}{', '.join(sizes)}{capacity}"
    names = matching(plan.workload, one.asked)
    if forms_logits(plan, one):
        yield (
            f"that is the size of {names[0]}, which a tiled loss never forms: tiling is not in "
            "effect. See model.config.tiling in the run's config.yaml; name the layout that ran by "
            "--layout"
        )
    elif names:
        yield f"that is the size of {'; or of '.join(names)}"
    else:
        yield "no tensor of this layout has that size; is --layout the one that ran?"
    if one.fragmented:
        yield (
            "fragmentation: the reserved and unused memory would have held it; set "
            f"{SET_ALLOCATOR} (`longhaul pretrain` and `run` do)"
        )
    if one.others:
        yield f"other processes hold {gib(one.others)} of this GPU; end them first"
    if one.allowed is not None and one.capacity and one.allowed < one.capacity:
        yield f"the process limits itself to {gib(one.allowed)}"
    outside, reserve = one.outside, plan.memory.categories["reserve"]
    if outside is not None and outside > 1.5 * reserve:
        yield f"{gib(outside)} are outside of PyTorch (NCCL, contexts), {gib(reserve)} were planned"
    whole = plan.cluster.gpu_bytes
    if one.capacity is not None and abs(one.capacity / whole - 1) > OTHER_GPU:
        yield (
            f"this GPU has {gib(one.capacity)} and {plan.cluster.name}'s {gib(whole)}; name yours "
            "with --cluster"
        )
    foreseen = plan.memory.total - reserve
    if one.needed is not None and one.needed > FAR_BELOW * foreseen:
        probe = "longhaul probe memory"
        if found.recipe.shipped is not None:
            probe += f" {found.asked}"
        yield (
            f"PyTorch needed {gib(one.needed)} and {gib(foreseen)} were predicted: measure it with "
            f"`{probe}`, by category; below, the {gib(one.needed - foreseen)} between them are "
            "treated as permanently allocated"
        )


def _nccl(found: Case) -> Iterator[str]:
    groups = len(rank_map(found.plan.workload, found.plan.cluster))
    yield (
        "its buffers are outside of PyTorch, a few hundred MiB for each group of ranks (this "
        f"layout has {groups}); fewer groups, NCCL_BUFFSIZE=2097152 (half of the default) and "
        "NCCL_NVLS_ENABLE=0 take less"
    )
    yield (
        f"memory in PyTorch's cache is not free for NCCL: {SET_ALLOCATOR} keeps the cache small; "
        "no remedy of the table adds a group"
    )


def forms_logits(plan: Plan, one: Sizes) -> bool:
    """Whether a failed request has the size of whole logits, and the layout tiles the loss."""
    if one.asked is None or not plan.workload.layout.tiling.loss:
        return False
    return any(name.startswith("logits") for name in matching(plan.workload, one.asked)[:1])


def _host(found: Case, one: Fault) -> Iterator[str]:
    plan = found.plan
    layout, ranks = plan.workload.layout, min(plan.gpus, plan.cluster.gpus_per_node)
    if one.sizes.asked is not None:
        yield f"{gib(one.sizes.asked)} asked for"
    yield (
        f"the plan pins {gib(plan.memory.host)} a rank, {gib(ranks * plan.memory.host)} of a "
        f"node's {plan.cluster.host_memory_gib:,.0f} GiB"
    )
    weights = plan.workload.most(plan.workload.weights)
    states = plan.workload.most(plan.workload.shard)
    copy = weights * plan.workload.element_bytes + 12 * states
    yield (
        f"an asynchronous checkpoint holds up to {gib(ranks * copy)} of a node meanwhile: "
        "trainer.strategy.ckpt_async_save=false avoids it"
    )
    yield one.known.remedy
    if layout.offload.tensors != "none":
        yield (
            "to pin less: model.config.offload.tensors=inputs, or model.config.offload.every=2 "
            "for half of the layers"
        )


def unexplained(plan: Plan, seen: Sequence[Fault]) -> float:
    """Return the bytes that a log shows beyond the prediction.

    A job that ran out of GPU memory did not fit, whatever the prediction says: if the log's sizes
    do not explain that, or it has none, the memory that the plan has to spare was in use, and a
    little more. Logits that a tiled loss never forms are not a reason for remedies.
    """
    failed = [
        fault for fault in seen
        if fault.kind in ON_THE_GPU and not forms_logits(plan, fault.sizes)
    ]  # fmt: skip
    reserve, worst = plan.memory.categories["reserve"], 0.0
    for one in (fault.sizes for fault in failed if fault.kind == "device"):
        if one.needed is None:
            continue
        beyond = max(0.0, one.needed - (plan.memory.total - reserve))
        beside = max(0.0, (one.outside or 0.0) - reserve) + one.others
        worst = max(worst, beyond + beside)
    if not failed or plan.short + worst > 0:
        return worst
    of_nccl = all(fault.kind == "nccl_memory" for fault in failed)
    return -plan.short + (OF_NCCL if of_nccl else HEADROOM * plan.cluster.gpu_bytes)
