# SPDX-License-Identifier: Apache-2.0
"""Random layouts that the words of `recipes.notation.layout` can say, made without the search."""

from collections.abc import Iterator
from random import Random

from custom_modules.context_parallel.config import stage_sizes, ulysses_sizes
from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.planner.feasibility import before_planning, violations
from recipes.planner.plan import Plan
from recipes.planner.search.request import SearchRequest
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard

RECOMPUTE = (
    Recompute(),
    Recompute(kind="selective", modules=["mlp"]),
    Recompute(kind="selective", modules=["core_attn"]),
    Recompute(kind="kept_attention"),
    Recompute(kind="full"),
)
KEPT, FULL = RECOMPUTE[-2:]
SHARDING = ("none", "optimizer", "optimizer", "optimizer", "gradients", "parameters", "parameters")
ADAM_ON_HOST = (0.0, 0.0, 0.1, 0.3, 0.5, 1.0)


def random_plans(question: SearchRequest, random: Random, draws: int) -> Iterator[Plan]:
    """Yield the plans of random layouts that fit and violate no constraint."""
    for _ in range(draws):
        layout = random_layout(question, random)
        if before_planning(question.workload(layout), question.cluster):
            continue
        plan = question.plan(layout)
        if plan.fits and not list(violations(plan.workload, question.cluster)):
            yield plan


def random_layout(question: SearchRequest, random: Random) -> Layout:
    """Return sizes whose product is the GPUs; half of the layouts save as much as they can."""
    card, gpus = question.card, question.gpus
    tp = random.choice([n for n in _divisors(gpus) if card.heads % n == card.kv_heads % n == 0])
    pp = random.choice([1, *(n for n in _divisors(gpus // tp) if card.layers % n == 0)])
    may_be = [n for n in range(2, 9) if pp > 1 and card.layers % (pp * n) == 0]
    vpp = random.choice([1, *may_be])
    cp = random.choice(_divisors(gpus // (tp * pp)))
    saving = random.random() < 0.5
    recompute = random.choice((KEPT, FULL) if saving else RECOMPUTE)
    sharding = random.choice(SHARDING)
    experts = _experts(card, tp, gpus // pp, random) if card.experts else {}
    return Layout(
        tp=tp,
        cp=_context_parallel(card.heads // tp, card.kv_heads // tp, cp, random),
        pp=pp,
        vpp=vpp,
        dp=gpus // (tp * pp * cp),
        **experts,
        micro_batch=random.choice((1, 1, 1, 2, 4, 8)),
        recompute=recompute,
        tiling=Tiling(
            loss=sharding != "parameters" and (saving or random.random() < 0.5),
            mlp=not card.experts and (saving or random.random() < 0.5),
        ),
        offload=_offload(recompute, random),
        sharding=sharding,
        optimizer_offload=random.choice(ADAM_ON_HOST) if sharding == "optimizer" else 0.0,
        fp8=question.fp8,
    )


def _experts(card: ModelCard, tp: int, stage: int, random: Random) -> dict[str, int]:
    etp = random.choice([n for n in (1, tp, 2 * tp) if stage % n == 0])
    ep = random.choice([n for n in _divisors(stage // etp) if card.experts % n == 0])
    return random.choice(({}, {"ep": ep, "etp": etp}, {"ep": ep, "etp": etp}))


def _context_parallel(heads: int, kv_heads: int, size: int, random: Random) -> ContextParallel:
    inside = random.choice([n for n in ulysses_sizes(heads, kv_heads) if size % n == 0])
    stage = random.choice([None, *stage_sizes(heads, kv_heads, inside)])
    if inside == 1:
        return ContextParallel.ring(size)
    if inside < size:
        return ContextParallel.hybrid(ulysses=inside, ring=size // inside, heads_per_stage=stage)
    if stage is None:
        return ContextParallel.ulysses(size)
    return ContextParallel.head_chunked(size, heads_per_stage=stage)


def _offload(recompute: Recompute, random: Random) -> Offload:
    kinds = {"kept_attention": ("none", "inputs", "both"), "full": ("none", "inputs")}
    tensors = random.choice(kinds.get(recompute.kind, ("none",)))
    return Offload(tensors=tensors, cap_gib=0.0 if tensors == "none" else 1e6)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
