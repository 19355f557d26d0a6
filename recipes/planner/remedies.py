# SPDX-License-Identifier: Apache-2.0
"""Changes with which a stage that ran out of memory fits: the search on GPUs with less memory.

Taken is the first of these that fits, what was tried on GPUs before what was not:

    the same parallel sizes, then any on the same GPUs
    twice the GPUs, up to `MOST_GPUS` times as many
    half the length, down to `SHORTEST` tokens, on these GPUs and then on the most

The difference of the two layouts says what to change, in the order of `ORDER`. Bytes and seconds
are the planner's; `unexplained` are bytes that a log shows but the planner does not predict. No
change reduces them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from recipes.planner.overrides import override_words
from recipes.planner.plan import HEADROOM, Plan, plan
from recipes.planner.rank_groups import rank_map
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest
from recipes.planner.workload import Workload
from recipes.spec.layout import Layout
from recipes.spec.units import K

MOST_GPUS, SHORTEST = 16, K
ORDER = (
    "smaller micro-batch, tiled loss and MLP, recompute, fewer heads at a time, more CP and TP, "
    "offload, sharded parameters, Adam on the host, more GPUs, a shorter stage"
)
"""Changes, the cheapest first: batch arithmetic, checkpointing, then ranks, offload and length."""
UNTRIED = frozenset({"sharded gradients", "sharded parameters", "Adam on the host"})
"""Changes not tried in whole runs on GPUs, the planner's last resorts."""
Keep = Callable[[Layout], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A difference of two layouts."""

    name: str
    together: Plan
    """With the changes before it."""
    words: tuple[str, ...]
    """Overrides that apply it after the changes before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A plan that fits, and what to change for it: nothing if nothing is lacking."""

    plan: Plan
    changes: tuple[Change, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the changes."""
        return tuple(one.name for one in self.changes)


def remedy(start: Plan, *, unexplained: float = 0.0, more_groups: bool = True) -> Remedy | None:
    """Return what fits in place of a plan; None if neither more GPUs nor a shorter stage do.

    Without `more_groups` it has no more groups of ranks, each with buffers of NCCL, than the plan.
    """
    if start.short + unexplained <= 0 and start.host_short <= 0:
        return Remedy(plan=start, changes=())
    asked = start.workload
    question = SearchRequest(
        card=asked.card,
        seq_length=asked.seq_length,
        tokens_per_batch=asked.tokens_per_batch,
        cluster=start.cluster,
        gpus=start.gpus,
        fp8=asked.layout.fp8,
        documents=asked.documents,
    )
    most = math.inf if more_groups else len(rank_map(asked, start.cluster))
    found = next(_fitting(question, asked.layout, unexplained, most), None)
    return None if found is None else Remedy(plan=found, changes=tuple(changes(asked, found)))


def choice(question: SearchRequest, unexplained: float, keep: Keep | None = None) -> list[Plan]:
    """Return the plans that leave room for bytes that a log shows, the planner's choice first."""
    if unexplained >= (1 - HEADROOM) * question.cluster.gpu_bytes:
        return []
    found = search(question.with_less_memory(unexplained), keep=keep).plans
    return [question.plan(one.workload.layout) for one in found]


def _fitting(
    question: SearchRequest, layout: Layout, unexplained: float, most_groups: float
) -> Iterator[Plan]:
    def few_groups(asked: SearchRequest) -> Keep | None:
        def keep(shape: Layout) -> bool:
            return len(rank_map(asked.workload(shape), asked.cluster)) <= most_groups

        return None if most_groups == math.inf else keep

    def same_sizes(shape: Layout) -> bool:
        return all(
            getattr(shape, name) == getattr(layout, name) for name in ("tp", "pp", "ep")
        ) and (shape.cp.size == layout.cp.size and shape.micro_batch <= layout.micro_batch)

    here = [choice(question, unexplained, keep) for keep in (same_sizes, few_groups(question))]
    yield from sorted((plans[0] for plans in here if plans), key=lambda one: bool(one.untried))
    doubled = [question.gpus * 2**n for n in range(1, MOST_GPUS.bit_length())]
    halved = []
    length = question.seq_length
    while length % 2 == 0 and (length := length // 2) >= SHORTEST:
        halved.append(length)
    larger = [replace(question, gpus=gpus) for gpus in doubled]
    shorter = [
        replace(question, seq_length=length, gpus=gpus)
        for gpus in (question.gpus, doubled[-1])
        for length in halved
    ]
    if not (shorter and choice(shorter[-1], unexplained, few_groups(shorter[-1]))):
        shorter = []  # what the least does not fit
    for other in (*larger, *shorter):
        yield from choice(other, unexplained, few_groups(other))[:1]


def changes(before: Workload, after: Plan) -> Iterator[Change]:
    """Yield what differs between a workload and a plan, in the order of `ORDER`."""
    here = before
    for name, fields in _differences(before, after.workload):
        now = replace(here, layout=replace(here.layout, **fields))
        if name == "shorter stage":
            now = replace(now, seq_length=after.workload.seq_length)
        together = after if now == after.workload else plan(now, after.cluster)
        yield Change(name=name, together=together, words=tuple(override_words(here, now)))
        here = now


def _differences(before: Workload, after: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each difference and the fields of the layout that it sets."""
    one, other = before.layout, after.layout
    sizes = {name: getattr(other, name) for name in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")}
    ranks = _of_ranks(one, other) if any(getattr(one, n) != v for n, v in sizes.items()) else ""
    first = replace(other.tiling, mlp=one.tiling.mlp, mlp_tile=one.tiling.mlp_tile)
    offload = {"offload": other.offload}
    with_recompute = offload if one.offload.refusal(other.recompute) else {}
    sharded = {"none": "replicated optimizer", "optimizer": "sharded optimizer"}.get(
        other.sharding, f"sharded {other.sharding}"
    )
    several: list[tuple[bool, str, dict[str, Any]]] = [
        (other.micro_batch != one.micro_batch, "smaller micro-batch",
         {"micro_batch": other.micro_batch}),
        (first != one.tiling, _tiled("loss", other.tiling.loss), {"tiling": first}),
        (other.tiling != first, _tiled("MLP", other.tiling.mlp), {"tiling": other.tiling}),
        (other.recompute != one.recompute, f"recompute {other.recompute.kind}",
         {"recompute": other.recompute, **with_recompute}),
        (bool(ranks) and ranks != "more GPUs", ranks, sizes),
        (other.offload != one.offload and not with_recompute, f"offload {other.offload.tensors}",
         offload),
        (other.sharding != one.sharding, sharded, {"sharding": other.sharding}),
        (other.optimizer_offload != one.optimizer_offload, "Adam on the host",
         {"optimizer_offload": other.optimizer_offload}),
        (ranks == "more GPUs", ranks, sizes),
        (after.seq_length != before.seq_length, "shorter stage", {}),
    ]  # fmt: skip
    yield from ((name, fields) for differs, name, fields in several if differs)


def _tiled(part: str, tiled: bool) -> str:
    return f"{'tiled' if tiled else 'untiled'} {part}"


def _of_ranks(one: Layout, other: Layout) -> str:
    """Return a name of the change of parallel sizes."""
    if other.world_size > one.world_size:
        return "more GPUs"
    changed = {
        name for name in ("tp", "pp", "ep", "etp") if getattr(one, name) != getattr(other, name)
    }
    more_cp = other.cp.size > one.cp.size
    if changed == {"tp"} and other.tp > one.tp and not more_cp:
        return "more TP"
    if changed or other.cp.size < one.cp.size or other.vpp != one.vpp:
        return "other parallel sizes"
    if more_cp:
        return "more CP"
    return "fewer heads at a time" if other.cp.how.may_chunk_heads else "other CP"
