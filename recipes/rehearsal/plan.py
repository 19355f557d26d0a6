# SPDX-License-Identifier: Apache-2.0
"""Plan of a rehearsal: a recipe as two short stages on CPU ranks.

The stage and the one before it, since long runs tend to fail at the hand-over between stages. A
first stage is preceded by one from random weights at the card's own context, which replaces the
published weights; a first stage from random weights is rehearsed with the second stage instead.
`recipes.rehearsal.shrink` reduces the numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from recipes.notation.describe import non_default_text
from recipes.rehearsal import shrink
from recipes.rehearsal.shrink import RANKS_BY_KIND, ParallelDegrees
from recipes.rehearsal.tiles import fit_tiles, micro_batches
from recipes.shipped.row import Row
from recipes.spec import pipeline
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import recipe_name
from recipes.spec.stage import Ladder, Stage
from recipes.spec.train_short import Positions

STEPS = 6
"""Optimizer steps of a stage: one of warm-up if the recipe warms up for a tenth, then decay."""
PEAK = 1e-3
"""Minimum of the larger peak rate of the two: with the rate of a large model a few steps of a small
one show nothing. Twice that overshoots after the hand-over, where Adam starts anew."""
BATCH = 512
"""Minimum of tokens per step, if the recipe has enough micro-batches."""
UNSHARED = Layout().cp
STAND_IN = "native"
"""Name of the ladder of one stage that replaces the published weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One stage of a rehearsal, with its ladder and its layout."""

    ladder: Ladder
    stage: Stage
    layout: Layout
    ranks_per_node: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """The recipe's two stages and the small ones that rehearse them."""

    name: str
    whole_card: ModelCard
    whole: tuple[Part, Part]
    card: ModelCard
    parts: tuple[Part, Part]

    @property
    def stage_names(self) -> list[str]:
        """Recipe names of the small stages, in order."""
        return [recipe_name(self.card, part.ladder, part.stage) for part in self.parts]

    @property
    def ranks(self) -> int:
        """Ranks of the larger stage."""
        return max(part.layout.world_size for part in self.parts)

    def compared(self) -> list[tuple[str, str, str]]:
        """Return rows of fact, value in the recipe and value in the rehearsal, as text."""
        whole = [_facts(self.whole_card, part) for part in self.whole]
        small = [_facts(self.card, part) for part in self.parts]
        return [
            (what, _joined(one[what] for one in whole), _joined(one[what] for one in small))
            for what in whole[0]
        ]

    def notes(self) -> list[str]:
        """Return one sentence for each part that is left out or replaced."""
        return list(dict.fromkeys(_notes(self)))


def rehearsal(row: Row, *, ranks: int, rows: Mapping[str, Row], vocab: int = 0) -> Rehearsal:
    """Return the rehearsal of a row on at most `ranks` ranks, for a tokenizer of `vocab` tokens.

    The layout of the stage before is taken from `rows`, or else is the row's own. Raises ValueError
    if the row violates a constraint, and for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"a rehearsal needs at least 1 rank; got {ranks}")
    whole = _pair(row, rows)
    card = row.card
    shares = [
        ParallelDegrees.of(card, part.stage.seq_length, part.layout, part.ranks_per_node)
        for part in whole
    ]
    kept = [shrink.fewer_ranks(share.ranks, ranks) for share in shares]
    lengths = [part.stage.target_length for part in whole]
    by = shrink.divisor([*lengths, *(part.stage.seq_length for part in whole)])
    small = shrink.smaller_card(card, by, zip(shares, kept, strict=True), vocab=vocab)
    layouts = [
        shrink.smaller_layout(part.layout, share, sizes, card=card, small=small)
        for part, share, sizes in zip(whole, shares, kept, strict=True)
    ]
    stages = _stages(whole, layouts, by, card=small, whole_head_dim=card.head_dim)
    fitted = [
        fit_tiles(layout, part.layout, cards=(card, small), stages=(part.stage, stage))
        for layout, part, stage in zip(layouts, whole, stages, strict=True)
    ]
    return Rehearsal(
        name=row.name,
        whole_card=card,
        whole=whole,
        card=small,
        parts=_parts(whole, stages, fitted),
    )


def _pair(row: Row, rows: Mapping[str, Row]) -> tuple[Part, Part]:
    """Return the stage before the recipe's, or its replacement, and the recipe's stage."""
    order = row.ladder.stages
    place = order.index(row.stage)
    if row.stage.start == "scratch" and len(order) > 1:
        place += 1
    asked = order[place]
    if place == 0:
        before = _stand_in(row.card, asked, row.layout)
        return _part(row, before, asked, rows), _part(row, asked, asked, rows)
    return _part(row, order[place - 1], asked, rows), _part(row, asked, asked, rows)


def _part(row: Row, stage: Stage, asked: Stage, rows: Mapping[str, Row]) -> Part:
    ladder = row.ladder if stage in row.ladder.stages else _alone(stage)
    named = rows.get(recipe_name(row.card, ladder, stage))
    found = row if stage == row.stage or named is None else named
    ranks_per_node = found.layout.world_size // found.nodes
    return Part(ladder=ladder, stage=stage, layout=found.layout, ranks_per_node=ranks_per_node)


def _alone(stage: Stage) -> Ladder:
    return Ladder(name=STAND_IN, source="in place of the published weights", stages=(stage,))


def _stand_in(card: ModelCard, asked: Stage, layout: Layout) -> Stage:
    """Return a stage from random weights at the card's own context and rotation.

    A step has the tokens of the stage's, and at least one micro-batch for each data rank.
    """
    sequences = asked.tokens_per_batch // card.native_context
    batch = max(layout.micro_batch * layout.dp, sequences) * card.native_context
    return replace(
        asked,
        seq_length=card.native_context,
        rope="native",
        positions=Positions(),
        tokens=asked.steps * batch,
        tokens_per_batch=batch,
        start="scratch",
    )


def _stages(
    whole: tuple[Part, Part],
    layouts: list[Layout],
    by: int,
    *,
    card: ModelCard,
    whole_head_dim: int,
) -> list[Stage]:
    """Return both stages reduced, with the ratio of their tokens per step preserved."""
    rates_times = max(1.0, PEAK / max(part.stage.lr.peak for part in whole))
    asked, layout = whole[1], layouts[1]
    unit = layout.micro_batch * layout.dp
    seq_length = shrink.length(asked.stage.seq_length, by, 2 * layout.cp.size * layout.tp)
    accumulated = max(2, layout.pp, ceil(BATCH / (unit * seq_length)))
    accumulated = min(accumulated, shrink.MICRO_BATCHES, micro_batches(asked.stage, asked.layout))
    batch = unit * shrink.even_micro_batches(layout, accumulated)
    made: list[Stage] = []
    for part, small in ((asked, layout), (whole[0], layouts[0])):
        sequences = batch
        if made:
            unit = small.micro_batch * small.dp
            tokens = made[0].tokens_per_batch * part.stage.tokens_per_batch
            sequences = tokens // asked.stage.tokens_per_batch
            sequences //= shrink.length(part.stage.seq_length, by, 2 * small.cp.size * small.tp)
            accumulated = min(shrink.MICRO_BATCHES, max(1, sequences // unit))
            sequences = shrink.even_micro_batches(small, accumulated) * unit
        made.append(
            shrink.smaller_stage(
                part.stage,
                by,
                card=card,
                whole_head_dim=whole_head_dim,
                layout=small,
                steps=STEPS,
                sequences=sequences,
                rates_times=rates_times,
            )
        )
    return made[::-1]


def _parts(
    whole: tuple[Part, Part], stages: list[Stage], layouts: list[Layout]
) -> tuple[Part, Part]:
    """Return the small stages in new ladders: one ladder of both, or one each."""
    before, asked = stages
    before = replace(before, start="scratch", optimizer="new")
    if whole[0].ladder.name == STAND_IN:
        ladders = [
            replace(part.ladder, stages=(stage,))
            for part, stage in zip(whole, (before, replace(asked, start="card")), strict=True)
        ]
    else:
        if (
            before.seq_length == asked.seq_length
        ):  # both at the minimum, and folders are named by length
            asked = _longer(asked)
        ladders = [replace(whole[1].ladder, stages=(before, replace(asked, start="previous")))] * 2
    first, second = (
        Part(
            ladder=ladder,
            stage=ladder.stages[min(number, len(ladder.stages) - 1)],
            layout=layout,
            ranks_per_node=layout.world_size,
        )
        for number, (ladder, layout) in enumerate(zip(ladders, layouts, strict=True))
    )
    return first, second


def _longer(stage: Stage) -> Stage:
    """Return the stage at twice its length, with the same number of sequences per step."""
    positions = stage.positions
    if positions.target_length is not None:
        positions = replace(positions, target_length=2 * positions.target_length)
    return replace(
        stage,
        seq_length=2 * stage.seq_length,
        positions=positions,
        tokens=2 * stage.tokens,
        tokens_per_batch=2 * stage.tokens_per_batch,
    )


def _facts(card: ModelCard, part: Part) -> dict[str, str]:
    """Return as text the facts that a rehearsal keeps or reduces, by name."""
    stage, layout = part.stage, part.layout
    share = ParallelDegrees.of(card, stage.seq_length, layout, part.ranks_per_node)
    experts = f", {card.experts_per_token} of {card.experts} experts" if card.experts else ""
    kinds = {"CP": layout.cp.size, "TP": layout.tp, "PP": layout.pp, "DP": layout.dp}
    if card.experts:
        kinds |= {"EP": layout.ep, "ETP": layout.expert_tp}
    return {
        "tokens": f"{stage.seq_length:,}",
        "positions": _positions(stage),
        "rotation": _rotation(card, stage),
        "documents": stage.documents,
        "tokens a step": f"{stage.tokens_per_batch:,}",
        "micro-batches": f"{micro_batches(stage, layout)} x {layout.micro_batch}",
        "steps": f"{stage.steps:,}",
        "peak rate": f"{stage.lr.peak:g}",
        "model": f"{card.family}, {card.layers} layers of {card.hidden}{experts}",
        **({} if card.pattern is None else {"layers that differ": card.pattern.describe()}),
        "heads": f"{card.heads}, {card.kv_heads} KV, of {card.head_dim}",
        **{name: str(size) for name, size in kinds.items()},
        "CP kind": str(share.cp).partition(":")[0] if layout.cp != UNSHARED else "none",
        "recompute": non_default_text(layout.recompute),
        "tiling": non_default_text(layout.tiling),
        "offload": non_default_text(layout.offload),
        "sharding": layout.sharding,
        "optimizer on the CPU": f"{layout.optimizer_offload:g}",
        "precision": f"{layout.precision}, fp8 {non_default_text(layout.fp8)}"
        if layout.fp8.recipe != "none"
        else layout.precision,
    }


def _rotation(card: ModelCard, stage: Stage) -> str:
    rope = card.native_rope if stage.rope == "native" else stage.rope
    words = f"{rope.method}, base {rope.base:,.0f}"
    if rope.original_length is not None:
        words += f", {rope.factor:g} x {rope.original_length:,}"
    return words


def _positions(stage: Stage) -> str:
    how = stage.positions
    return how.kind if how.target_length is None else f"{how.kind}, up to {how.target_length:,}"


def _joined(words: Iterator[str]) -> str:
    return " -> ".join(dict.fromkeys(words))


def _notes(made: Rehearsal) -> Iterator[str]:
    if made.whole[0].ladder.name == STAND_IN:
        yield (
            f"{made.stage_names[0]}, from random weights at the model's own context, replaces "
            "the published weights"
        )
    else:
        yield f"{made.stage_names[0]} starts from random weights; no stage precedes it here"
    for whole, small in zip(made.whole, made.parts, strict=True):
        yield from _left_out(made, whole, small)
        layout = whole.layout
        if layout.device == "cuda":
            yield "Transformer Engine's layers and kernels need GPUs; torch's replace them"
        if layout.fp8.recipe != "none":
            yield f"fp8 {layout.fp8.recipe} is left out, since CPUs do not support it"
        if layout.sharding != small.layout.sharding:
            yield (
                f"sharding {layout.sharding} uses Megatron FSDP, whose checkpoints CPU cannot "
                f"write; sharding {small.layout.sharding} replaces it"
            )
        if layout.optimizer_offload:
            yield "the optimizer is on the CPU anyway; no part of it is offloaded"
        if layout.cp.how.kind in shrink.BY_TORCH:
            yield (
                f"context parallel kind {layout.cp.how.kind} is Transformer Engine's; "
                f"{small.layout.cp.how.kind} replaces it"
            )
        if whole.stage.lr.peak != small.stage.lr.peak:
            times = small.stage.lr.peak / whole.stage.lr.peak
            yield f"peak rates are {times:,.3g} times the recipe's, so that {STEPS} steps show"


def _left_out(made: Rehearsal, whole: Part, small: Part) -> Iterator[str]:
    """Yield a sentence with the kinds of parallelism that the ranks are not enough for."""
    share = ParallelDegrees.of(
        made.whole_card, whole.stage.seq_length, whole.layout, whole.ranks_per_node
    )
    kept = ParallelDegrees.of(made.card, small.stage.seq_length, small.layout, small.ranks_per_node)
    pp = small.layout.pp
    uneven = pipeline.is_uneven(made.whole_card.layers, whole.layout.pp)
    if uneven and pp > 1 and not pipeline.is_uneven(made.card.layers, pp):
        yield f"pipeline stages of uneven length are left out: {pp} stages have the same length"
    if whole.layout.vpp > 1 == small.layout.vpp and pp > 1:
        yield f"the pipeline is not interleaved: {made.card.layers} layers on {pp} stages"
    lost = [kind for kind in RANKS_BY_KIND if share.ranks[kind] > 1 == kept.ranks[kind]]
    if whole.layout.ep > 1 == small.layout.ep:
        lost.append("EP")
    if lost:
        words = " and ".join(filter(None, [", ".join(lost[:-1]), lost[-1]]))
        needed = prod(2 for size in share.ranks.values() if size > 1)
        yield f"{words} skipped: not enough ranks; --ranks {needed} has room for every kind"
