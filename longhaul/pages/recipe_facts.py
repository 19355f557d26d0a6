# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a recipe that the pages of the command line share; light."""

from collections.abc import Iterator
from functools import cache
from typing import Literal

from custom_modules.rope.config import RopeScaling
from recipes.notation.describe import non_default_text
from recipes.shipped.row import Row
from recipes.spec import cluster
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import amount, counted, length_shown
from recipes.spec.stage import Cosine, Ladder, Stage

OWN = " (the card's own)"
_IN_THE_METHOD = (
    "method", "base", "factor", "original_length", "before", "short_factor", "long_factor",
)  # fmt: skip
_OFFLOADED = {
    "inputs": "layer inputs",
    "attention": "attention outputs",
    "both": "layer inputs and attention outputs",
}
_STARTS = {"scratch": "random weights", "card": "the card's weights", "previous": "the one before"}


def resolved(rope: RopeScaling | Literal["native"], card: ModelCard) -> RopeScaling:
    """Return the rotation that a stage has on a card."""
    return card.native_rope if rope == "native" else rope


def rotation(stage: Stage, card: ModelCard) -> str:
    """Return how a stage rotates positions: `yarn x4`, `base 8,000,000`, or the card's own.

    A method that scales has its base too where that is not the card's.
    """
    rope = resolved(stage.rope, card)
    other_base = rope.method != "default" and rope.base != card.native_rope.base
    base = f", base {rope.base:,.10g}" if other_base else ""
    return _method(rope) + base + (OWN if rope == card.native_rope else "")


def rotation_in_full(rope: RopeScaling) -> str:
    """Return a rotation with all its stated values except the divisors of pairs."""
    words = _method(rope)
    if rope.original_length is not None:
        words += f" of {rope.original_length:,} tokens, base {rope.base:,.10g}"
    for name, value in rope.non_default_fields().items():
        if name not in _IN_THE_METHOD:
            words += f", {name} {value:g}"
    if rope.temperature != 1:
        words += f"; temperature {rope.temperature:.4g}"
    return words


def _method(rope: RopeScaling) -> str:
    if rope.method == "default":
        return f"base {rope.base:,.10g}"
    over = "" if rope.before is None else f" over {_method(rope.before)}"
    return f"{rope.method} x{rope.factor:g}{over}"


def length(stage: Stage) -> str:
    """Return the tokens of a stage's sequences, and of the context they train for if longer."""
    words = length_shown(stage.seq_length)
    if stage.target_length != stage.seq_length:
        words += f" for {length_shown(stage.target_length)}"
    return words


def machines(row: Row) -> str:
    """Return the nodes and the GPUs of each: `4 x 8 H100`; for CPU ranks, their number."""
    if row.layout.device == "cpu":
        return f"CPU, {row.layout.world_size} ranks"
    kind = gpu(row.cluster).split()[0]
    return f"{row.nodes} x {row.layout.world_size // row.nodes} {kind}"


@cache
def gpu(cluster_name: str) -> str:
    """Return the name of a cluster's GPUs: `H100 SXM5 80 GB`."""
    return cluster.load(cluster_name).gpu.name


def batch(stage: Stage) -> str:
    """Return the sequences of an optimizer step."""
    return f"{stage.sequences_per_batch:,} x {length_shown(stage.seq_length)}"


def schedule(stage: Stage) -> str:
    """Return the schedule of the learning rate: `cosine 1e-05 to 1e-06, 50 to warm up`."""
    lr, warmup = stage.lr, stage.lr.warmup_steps(stage.steps)
    if lr.final_ratio == 1:
        course = f"constant {lr.peak:g}"
    else:
        shape = "cosine" if isinstance(lr, Cosine) else "line"
        course = f"{shape} {lr.peak:g} to {lr.peak * lr.final_ratio:g}"
    return f"{course}, {warmup:,} to warm up" if warmup else f"{course}, no warm-up"


def training(stage: Stage, card: ModelCard) -> Iterator[str]:
    """Yield the rotation of a stage, what it starts from, and its optimizer."""
    yield rotation_in_full(resolved(stage.rope, card)) + _layers_it_turns(card)
    carried = ", with the state of the previous stage" if stage.optimizer == "carried" else ""
    yield (
        f"starts from {_STARTS[stage.start]}; Adam with beta2 {stage.adam_beta2:g}, weight decay "
        f"{stage.weight_decay:g}{carried}"
    )
    if stage.mix is not None:
        yield f"mix: {stage.mix.words}"
    if stage.recovers is not None:
        yield f"recovers short text within a context of {stage.recovers:,} tokens"


def _layers_it_turns(card: ModelCard) -> str:
    """Return which layers a stage's rotation is on; empty if it is on all of them."""
    if card.pattern is None:
        return ""
    if card.pattern.local_rope is not None:
        return "; on full layers only"
    return "" if card.pattern.full_rotates else "; on the layers that rotate"


def model(card: ModelCard) -> Iterator[str]:
    """Yield a model's shape, its native context, and where its weights are."""
    experts = f", {card.experts_per_token} of {card.experts} experts" if card.experts else ""
    yield (
        f"{card.facts.name}, {card.layers} layers of {card.hidden:,}, MLP of "
        f"{card.ffn_hidden:,}{experts}; {card.heads} heads ({card.kv_heads} KV) of "
        f"{card.head_dim}; vocabulary of {card.vocab:,}; {amount(card.parameters)} weights"
    )
    yield (f"native context {card.native_context:,} tokens, {rotation_in_full(card.native_rope)}")
    if card.pattern is not None:
        yield f"layers differ: {card.pattern.describe()}"
    revision = f", revision {card.hf_revision}" if card.hf_revision else ""
    yield f"Hugging Face: {card.hf_id or 'not published'}{revision}"


def weights(ladder: Ladder, card: ModelCard) -> str:
    """Return the weights that a ladder starts from, and those of its source if they differ."""
    if ladder.stages[0].start != "card":
        return ""
    if card.start:
        return f"the import at {card.start}"
    said = (
        f"{card.hf_id}, which the import below fetches"
        if card.hf_id
        else f"yours, since those of {card.name} are not published"
    )
    if not ladder.starts_from:
        return said
    return f"{said}; the source began with {ladder.starts_from}, which `--from` takes as well"


def layout(row: Row) -> Iterator[str]:
    """Yield the layout of a stage on ranks, then its batch, then what layers keep."""
    plan, stage = row.layout, row.stage
    kinds = {"TP": plan.tp, "CP": plan.cp.size, "PP": plan.pp, "DP": plan.dp}
    of_experts = {"EP": plan.ep, "ETP": plan.etp or 1}
    shared = {kind: f"{kind} {size}" for kind, size in kinds.items() if size > 1}
    if plan.cp.size > 1 or plan.cp.how.kind == "head_chunked":
        shared["CP"] = f"CP {plan.cp.size} ({_sharing(plan.cp)})"
    split = [shared[kind] for kind in kinds if kind in shared]
    ranks = counted(plan.world_size, "GPU" if plan.device == "cuda" else "CPU rank")
    nodes = counted(row.nodes, f"{row.cluster} node")
    experts = " x ".join(f"{kind} {size}" for kind, size in of_experts.items() if size > 1)
    yield (
        f"{ranks} on {nodes}: {' x '.join(split) or 'no parallelism'}"
        + (f"; experts {experts}" if experts else "")
    )
    forwards = stage.sequences_per_batch // (plan.micro_batch * plan.dp)
    yield f"micro-batch {plan.micro_batch}, accumulation {forwards}, {_precision(plan)}"
    yield (
        f"recompute {non_default_text(plan.recompute)}; "
        f"tiling {non_default_text(plan.tiling)}; sharding {plan.sharding}"
    )
    yield f"on the host: {_on_the_host(plan) or 'nothing'}"


def _on_the_host(plan: Layout) -> str:
    offload, adam = plan.offload, plan.optimizer_offload
    words = []
    if offload.tensors != "none":
        layers = f" of one layer in {offload.every}" if offload.every > 1 else ""
        tensors = f"{_OFFLOADED[offload.tensors]}{layers}"
        words.append(f"{tensors}, up to {offload.cap_gib:g} GiB a rank")
    if adam:
        words.append(f"{adam:.0%} of the optimizer")
    return "; ".join(words)


def _sharing(cp: ContextParallel) -> str:
    words = str(cp.how.kind)
    if cp.how.ulysses is not None:
        words += f" {cp.how.ulysses} x {cp.size // cp.how.ulysses}"
    if cp.how.heads_per_stage is not None:
        words += f", {counted(cp.how.heads_per_stage, 'head')} at a time"
    return words


def _precision(plan: Layout) -> str:
    return plan.precision + (
        f", fp8 {non_default_text(plan.fp8)}" if plan.fp8.recipe != "none" else ""
    )
