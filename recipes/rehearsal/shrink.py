# SPDX-License-Identifier: Apache-2.0
"""Model cards, stages and layouts reduced to the size of a laptop with the same structure.

All lengths, and the rotations with them, are divided by one number, so a context extended 4 times
is still extended 4 times. Widths, layers, vocabulary and experts become small and keep their
divisors. Each parallel size above 1 becomes 2, and more if enough ranks are available. Where some
layers differ, there are at least as many as from one full layer to the next, on each pipeline rank
if the others have a window, and the window is divided as the lengths are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, lcm, prod
from typing import Any

from custom_modules.context_parallel.config import (
    ContextParallelKind,
    Degrees,
    Kind,
    degrees,
    fits_ulysses,
    stage_sizes,
)
from custom_modules.gpt.vocabulary import padded_vocabulary
from custom_modules.memory.config import Recompute
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.constraints.layers import evenly_full
from recipes.rehearsal.mix import smaller_mix
from recipes.spec import pipeline
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Stage

HIDDEN, HEAD_DIM, VOCAB, EXPERTS = 128, 32, 512, 8
LAYERS_OF_RANK = 2
"""Layers per pipeline rank: two, so that choosing every second layer gives one."""
LONGEST, LONGEST_OF_WIDE = 1024, 8192
"""Tokens of the longest context; the second if it is over 16 times the shortest."""
SHORTEST = 64
"""Tokens of the shortest context; all lengths are multiples of it, as evaluation requires."""
MICRO_BATCHES = 4
"""Maximum of micro-batches per step on a data rank."""
BY_TORCH: dict[str, Kind] = {
    "p2p": "ring",
    "all_gather": "ring",
    "a2a": "ulysses",
    "a2a+p2p": "hybrid",
}
"""Our kinds that replace those of Transformer Engine, which CPU does not have."""

RANKS_BY_KIND = ("CP all-to-all", "CP ring", "TP", "PP", "DP")
"""Kinds of parallelism in the order in which they receive ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDegrees:
    """Parallel sizes of a layout for a model, and how CP exchanges heads."""

    ranks: dict[str, int]
    """Ranks by name in `RANKS_BY_KIND`."""
    cp: Degrees

    @classmethod
    def of(
        cls, card: ModelCard, seq_length: int, layout: Layout, ranks_per_node: int
    ) -> "ParallelDegrees":
        """Resolve the kind of context parallelism; raise ValueError if it does not fit."""
        cp = degrees(
            layout.cp.how,
            size=layout.cp.size,
            heads=card.heads // layout.tp,
            kv_heads=card.kv_heads // layout.tp,
            head_dim=card.head_dim,
            seq_length=seq_length,
            ranks_per_link=max(1, ranks_per_node // layout.tp),
            chunks=not card.facts.wide_qk_norm,
        )
        sizes = (cp.ulysses, cp.ring, layout.tp, layout.pp, layout.dp)
        return cls(ranks=dict(zip(RANKS_BY_KIND, sizes, strict=True)), cp=cp)


def fewer_ranks(whole: dict[str, int], ranks: int) -> dict[str, int]:
    """Return the sizes of each kind on at most `ranks` ranks: 2 for each above 1, in order.

    Remaining ranks double the kind that is reduced most. A kind that does not fit is 1.
    """
    kept = dict.fromkeys(whole, 1)
    for name, size in whole.items():
        if size > 1 and 2 * prod(kept.values()) <= ranks:
            kept[name] = 2
    while True:
        larger = [
            name
            for name, size in kept.items()
            if 1 < size <= whole[name] // 2 and 2 * prod(kept.values()) <= ranks
        ]
        if not larger:
            return kept
        kept[max(larger, key=lambda name: whole[name] / kept[name])] *= 2


def divisor(lengths: Iterable[int]) -> int:
    """Return the power of two that lengths are divided by.

    Ratios up to 128 are preserved; beyond, the shorter lengths are clamped to the shortest.
    """
    lengths = list(lengths)
    by = 1
    while max(lengths) > LONGEST * by and min(lengths) >= 2 * SHORTEST * by:
        by *= 2
    while max(lengths) > LONGEST_OF_WIDE * by:
        by *= 2
    return by


def length(tokens: int, by: int, unit: int = SHORTEST) -> int:
    """Return a length divided by `by`, rounded up to a multiple of `unit` and of the shortest."""
    step = lcm(unit, SHORTEST)
    return max(1, ceil(tokens / by / step)) * step


def rotation(rope: RopeScaling, by: int, *, head_dim: int, whole_head_dim: int) -> RopeScaling:
    """Return a rotation for contexts divided by `by`, with the same base and factor.

    LongRoPE's divisors of a smaller head are those of the same frequencies in the larger head.
    """
    changed: dict[str, Any] = {}
    if rope.original_length is not None:
        changed["original_length"] = max(2, round(rope.original_length / by))
    pairs = int(head_dim * rope.partial_rotary_factor) // 2
    whole_pairs = int(whole_head_dim * rope.partial_rotary_factor) // 2
    for name in ("short_factor", "long_factor"):
        divisors = getattr(rope, name)
        if divisors is not None and pairs < whole_pairs:
            changed[name] = [divisors[pair * whole_pairs // pairs] for pair in range(pairs)]
    if rope.before is not None:
        inner = rotation(rope.before, by, head_dim=head_dim, whole_head_dim=whole_head_dim)
        changed["before"] = inner
    return replace(rope, **changed)


def smaller_card(
    card: ModelCard,
    by: int,
    shares: Iterable[tuple[ParallelDegrees, dict[str, int]]],
    *,
    vocab: int = VOCAB,
) -> ModelCard:
    """Return the small model, for the full and the reduced ranks in each of `shares`.

    Preserves the family and the ratios of KV heads, FFN width and experts per token.
    """
    shares = list(shares)
    heads, kv_heads = _heads(card, shares)
    hidden, head_dim = min(card.hidden, HIDDEN), min(card.head_dim, HEAD_DIM)
    unit = 8 * max(kept["TP"] for _, kept in shares)
    ffn = max(1, round(card.ffn_hidden * hidden / card.hidden / unit)) * unit
    per_token = min(card.experts_per_token, 2)
    vocab = max(vocab, VOCAB)
    padded = any(
        padded_vocabulary(card.vocab, whole.ranks["TP"]) != card.vocab for whole, _ in shares
    )

    def undivided(tokens: int) -> bool:
        return all(tokens % kept["TP"] for _, kept in shares if kept["TP"] > 1)

    return replace(
        card,
        layers=_layers(card, shares),
        hidden=hidden,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=next(filter(undivided, count(vocab))) if padded else vocab,
        experts=min(card.experts, EXPERTS),
        experts_per_token=per_token,
        # Scaled to the width, see recipes.models.tiny; with a large model's it would not train.
        init_std=card.init_std if hidden == card.hidden else 0.5 * hidden**-0.5,
        native_context=length(card.native_context, by),
        native_rope=rotation(card.native_rope, by, head_dim=head_dim, whole_head_dim=card.head_dim),
        pattern=_pattern(card, by, head_dim),
        hf_id=None,
        hf_revision="",
    )


def _pattern(card: ModelCard, by: int, head_dim: int) -> LayerPattern | None:
    """Return which layers differ, with the window and the rotation of contexts divided by `by`."""
    pattern = card.pattern
    if pattern is None:
        return None
    own = pattern.local_rope
    if own is not None:
        own = rotation(own, by, head_dim=head_dim, whole_head_dim=card.head_dim)
    window = None if pattern.window is None else max(1, pattern.window // by)
    return replace(pattern, window=window, local_rope=own)


def _layers(card: ModelCard, shares: list[tuple[ParallelDegrees, dict[str, int]]]) -> int:
    """Return two layers for each pipeline rank; one on its ends if they are shorter in full.

    Where layers differ, from one full layer to the next, on each rank if the others have a window.
    """
    most = max(kept["PP"] for _, kept in shares)
    pattern = card.pattern
    if pattern is not None and (pattern.window is not None or most == 1):
        return max(pattern.every, LAYERS_OF_RANK) * most
    if pattern is not None:
        return most * max(LAYERS_OF_RANK, ceil(pattern.every / most))
    uneven = any(pipeline.is_uneven(card.layers, whole.ranks["PP"]) for whole, _ in shares)
    layers = LAYERS_OF_RANK * most - 2 * (uneven and most > 2)
    fit = all(pipeline.divides(kept["PP"], layers) for _, kept in shares)
    return layers if fit else LAYERS_OF_RANK * most


def _heads(
    card: ModelCard, shares: list[tuple[ParallelDegrees, dict[str, int]]]
) -> tuple[int, int]:
    """Return the fewest heads and KV heads that the kept ranks split as in the full model."""
    group = card.heads // card.kv_heads
    for alike in (True, False):
        for kv_heads in range(1, card.kv_heads + 1):
            if all(
                _shared(group * kv_heads, kv_heads, kept)
                and (not alike or _alike(card, kv_heads, whole, kept))
                for whole, kept in shares
            ):
                return group * kv_heads, kv_heads
    return card.heads, card.kv_heads


def _shared(heads: int, kv_heads: int, kept: dict[str, int]) -> bool:
    tp = kept["TP"]
    return kv_heads % tp == 0 and fits_ulysses(heads // tp, kv_heads // tp, kept["CP all-to-all"])


def _alike(card: ModelCard, kv_heads: int, whole: ParallelDegrees, kept: dict[str, int]) -> bool:
    """Whether KV heads are replicated and heads taken in stages as in the full model."""
    tp, ulysses = kept["TP"], kept["CP all-to-all"]
    if ulysses > 1:
        copied = card.kv_heads // whole.ranks["TP"] % whole.cp.ulysses > 0
        if copied != (kv_heads // tp % ulysses > 0):
            return False
    heads = card.heads // card.kv_heads * kv_heads // tp
    of_stage = whole.cp.heads_per_stage
    staged = of_stage is not None and of_stage < card.heads // whole.ranks["TP"]
    return not staged or stage_sizes(heads, kv_heads // tp, ulysses)[0] < heads


def smaller_layout(
    layout: Layout,
    whole: ParallelDegrees,
    kept: dict[str, int],
    *,
    card: ModelCard,
    small: ModelCard,
) -> Layout:
    """Return the layout on CPU ranks with the kept parallel sizes; `fitted` sets its tiles."""
    per_rank = _fullest(card, layout.pp), _fullest(small, kept["PP"])
    fsdp = layout.sharding in ("gradients", "parameters")
    ep, etp = _experts(layout, kept, small)
    return replace(
        layout,
        tp=kept["TP"],
        pp=kept["PP"],
        vpp=_chunks(layout, kept["PP"], small),
        dp=kept["DP"],
        ep=ep,
        etp=etp,
        cp=_context_parallel(layout.cp, whole, kept, card=card, small=small),
        micro_batch=min(layout.micro_batch, 2),
        recompute=_recompute(layout.recompute, *per_rank),
        sharding="optimizer" if fsdp else layout.sharding,
        optimizer_offload=0.0,
        fp8=Fp8(),
        device="cpu",
    )


def _chunks(layout: Layout, pp: int, small: ModelCard) -> int:
    """Return the chunks of a pipeline rank: as many as its layers allow, if it is interleaved."""
    interleaved = layout.vpp > 1 and pp > 1 and pipeline.divides(pp, small.layers, LAYERS_OF_RANK)
    pattern = small.pattern
    if interleaved and pattern is not None and pattern.window is not None:
        interleaved = evenly_full(pattern, small.layers, pp, LAYERS_OF_RANK)
    return LAYERS_OF_RANK if interleaved else 1


def even_micro_batches(layout: Layout, number: int) -> int:
    """Return about as many micro-batches, a multiple of PP if the pipeline is interleaved."""
    return max(1, number // layout.pp) * layout.pp if layout.vpp > 1 else number


def _experts(layout: Layout, kept: dict[str, int], small: ModelCard) -> tuple[int, int | None]:
    """Return EP and ETP on the kept ranks of a pipeline stage: EP as large as they allow."""
    tp = kept["TP"]
    etp = None if layout.etp is None else min(layout.etp, tp)
    stage = tp * kept["CP all-to-all"] * kept["CP ring"] * kept["DP"]
    ranks = stage // (tp if etp is None else etp)
    ep = max(n for n in range(1, layout.ep + 1) if ranks % n == 0 == small.experts % n)
    return ep, etp


def _context_parallel(
    cp: ContextParallel,
    whole: ParallelDegrees,
    kept: dict[str, int],
    *,
    card: ModelCard,
    small: ModelCard,
) -> ContextParallel:
    """Return the kind that replaces `auto` or Transformer Engine's, on fewer ranks."""
    ulysses, tp = kept["CP all-to-all"], kept["TP"]
    if cp.size == 1:
        return cp
    kind = BY_TORCH.get(whole.cp.kind, whole.cp.kind)
    of_stage = None
    if whole.cp.heads_per_stage is not None:
        stages = card.heads // whole.ranks["TP"] / whole.cp.heads_per_stage
        heads = small.heads // tp
        sizes = stage_sizes(heads, small.kv_heads // tp, ulysses)
        of_stage = min(sizes, key=lambda size: abs(heads / size - stages))
        if stages > 1 and of_stage == heads:
            of_stage = sizes[0]
    how = ContextParallelKind(
        kind=kind,
        ulysses=ulysses if kind == "hybrid" else None,
        heads_per_stage=of_stage,
    )
    return ContextParallel(size=ulysses * kept["CP ring"], how=how)


def _recompute(recompute: Recompute, whole: int, small: int) -> Recompute:
    """Return the recompute for a pipeline rank of `small` layers instead of `whole`."""
    if recompute.kind in ("uniform", "block"):
        return replace(recompute, layers=max(1, round(recompute.layers * small / whole)))
    return replace(recompute, every=min(recompute.every, small))


def smaller_stage(
    stage: Stage,
    by: int,
    *,
    card: ModelCard,
    whole_head_dim: int,
    layout: Layout,
    steps: int,
    sequences: int,
    rates_times: float,
) -> Stage:
    """Return the stage at lengths divided by `by`; `card` and `layout` are the small ones.

    It has few steps of `sequences` each; all rates are raised by the same factor.
    """
    seq_length = length(stage.seq_length, by, unit=2 * layout.cp.size * layout.tp)
    positions = stage.positions
    if positions.target_length is not None:
        target = max(length(positions.target_length, by), seq_length + SHORTEST)
        positions = replace(positions, target_length=target)
    recovers = stage.recovers and seq_length * stage.recovers // stage.seq_length
    rope = stage.rope
    if rope != "native":
        rope = rotation(rope, by, head_dim=card.head_dim, whole_head_dim=whole_head_dim)
    return replace(
        stage,
        seq_length=seq_length,
        mix=None if stage.mix is None else smaller_mix(stage.mix, stage.seq_length, seq_length),
        recovers=recovers,
        rope=rope,
        positions=positions,
        tokens=steps * sequences * seq_length,
        tokens_per_batch=sequences * seq_length,
        lr=replace(stage.lr, peak=stage.lr.peak * rates_times),
        gate=stage.gate.of_evaluation,  # a rehearsal runs no suites, and no samples of RULER
    )


def _fullest(card: ModelCard, pp: int) -> int:
    return max(map(len, pipeline.stages(card.layers, pp)))
