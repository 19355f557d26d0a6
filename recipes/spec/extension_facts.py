# SPDX-License-Identifier: Apache-2.0
"""Facts of a base model that make it hard to extend its context.

OlmPool (Bertsch et al. 2026, "Cracks in the Foundation", openreview.net/forum?id=MRXATMdzeC)
pretrained 26 models of 7B on the same data and extended each in the same way. Four choices add up:
normalization, grouped queries, the pretraining context, and sliding windows. One of them alone
matters little; three or more together cost up to 47% of the score on long context, and the loss on
short text does not show it. Llama-3 is known to extend easily, so the lines for the two choices
that are a matter of degree are drawn at its values: that is ours, not the paper's. A card has no
pretraining context; its native one stands in for it.

The limit of Ulysses is not about quality: it shares heads among ranks, so few KV heads leave long
sequences to ring or hybrid context parallelism.
"""

from dataclasses import dataclass

from custom_modules.context_parallel.config import fits_ulysses
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard

MOST_QUERIES = 4
"""Query heads of a KV head in Llama-3-8B; with more, KV heads are few."""
LEAST_CONTEXT = 8192
"""Pretraining context of Llama-3; a shorter one is short."""
CHOICES = 4
"""Choices of OlmPool, some of which a base may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """What is known of a model's attention, as far as extending it depends on it."""

    layers: int
    heads: int
    kv_heads: int
    qk_norm: bool
    native_context: int
    """Tokens."""
    windowed_layers: int = 0
    """Layers that attend within a sliding window only."""
    window: int | None = None
    """Tokens of that window."""
    unrotated_layers: int = 0
    """Layers without rotation of positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionFact:
    """One fact, with its numbers."""

    name: str
    words: str
    counted: bool = False
    """Whether it is one of OlmPool's choices, which add up."""


def facts_of(card: ModelCard) -> AttentionFacts:
    """Return what a card states of its attention."""
    pattern = card.pattern
    window = None if pattern is None else pattern.window
    full = card.layers if pattern is None else pattern.full_layers(card.layers)
    return AttentionFacts(
        windowed_layers=0 if window is None else card.layers - full,
        window=window,
        unrotated_layers=0 if pattern is None or pattern.full_rotates else full,
        layers=card.layers,
        heads=card.heads,
        kv_heads=card.kv_heads,
        qk_norm=card.facts.qk_norm,
        native_context=card.native_context,
    )


def extension_facts(
    model: AttentionFacts, layout: Layout | None = None, length: int | None = None
) -> list[ExtensionFact]:
    """Return the facts that make a context hard to extend; empty if there are none.

    With a layout also what few KV heads mean for its context parallelism. `length` is the
    length of the stage in tokens: a window of that length or more limits nothing.
    """
    found = []
    if model.qk_norm:
        found.append(
            ExtensionFact(
                name="qk_norm",
                words="queries and keys are normalised (QK norm)",
                counted=True,
            )
        )
    queries = model.heads // model.kv_heads
    if queries > MOST_QUERIES:
        found.append(
            ExtensionFact(
                name="kv_heads",
                words=f"few KV heads: {queries} query heads share each of {model.kv_heads} "
                f"(more than {MOST_QUERIES}, Llama-3-8B's)",
                counted=True,
            )
        )
    if model.native_context < LEAST_CONTEXT:
        found.append(
            ExtensionFact(
                name="native_context",
                words=f"a short native context: {model.native_context:,} tokens (fewer than "
                f"{LEAST_CONTEXT:,}, Llama-3's)",
                counted=True,
            )
        )
    within = model.window is None or length is None or model.window < length
    if model.windowed_layers and within:
        of_tokens = "" if model.window is None else f" of {model.window:,} tokens"
        found.append(
            ExtensionFact(
                name="window",
                words=f"{model.windowed_layers} of {model.layers} layers attend within a "
                f"window{of_tokens}, so only the other {model.layers - model.windowed_layers} "
                "can reach a longer context",
                counted=True,
            )
        )
    if model.unrotated_layers:
        found.append(
            ExtensionFact(
                name="unrotated_layers",
                words=f"{model.unrotated_layers} of {model.layers} layers have no rotation: the "
                "stage's RoPE setting changes only the others",
            )
        )
    tp, cp = (1, 1) if layout is None else (layout.tp, layout.cp.size)
    ranks = tp * cp
    kv_heads = model.kv_heads // tp
    repeated = kv_heads > 0 and fits_ulysses(model.heads // tp, kv_heads, cp)
    if ranks > model.kv_heads and not repeated:
        heads = "1 KV head is" if model.kv_heads == 1 else f"{model.kv_heads} KV heads are"
        found.append(
            ExtensionFact(
                name="ulysses",
                words=f"{heads} fewer than TP x CP = {ranks}: Ulysses alone "
                "cannot share a sequence among these ranks, so ring or hybrid does",
            )
        )
    return found


def card_facts(
    card: ModelCard, layout: Layout | None = None, length: int | None = None
) -> list[ExtensionFact]:
    """Return the facts that make a card's context hard to extend; empty if there are none."""
    return extension_facts(facts_of(card), layout, length)


def lines(found: list[ExtensionFact]) -> list[str]:
    """Return a line for each fact, and before them how many of them add up."""
    return [*filter(None, [counted(found)]), *(fact.words for fact in found)]


def counted(found: list[ExtensionFact]) -> str:
    """Return a sentence on how many of the choices that add up a base has; empty for none."""
    number = sum(fact.counted for fact in found)
    if not number:
        return ""
    adds = "three or more cost much" if number > 2 else "fewer than three cost little"
    return f"{number} of {CHOICES} choices that add up to make extension hard (OlmPool): {adds}"
