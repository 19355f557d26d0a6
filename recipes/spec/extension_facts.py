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

from collections.abc import Iterator
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
class ExtensionFact:
    """One fact, with its numbers."""

    name: str
    words: str
    counted: bool = False
    """Whether it is one of OlmPool's choices, which add up."""


def card_facts(
    card: ModelCard, layout: Layout | None = None, length: int | None = None
) -> list[ExtensionFact]:
    """Return the facts that make a card's context hard to extend; empty if there are none.

    With a layout also what few KV heads mean for its context parallelism. `length` is the
    length of the stage in tokens: a window of that length or more limits nothing.
    """
    choices = dict(_choices(card, length))
    facts = [ExtensionFact(name=name, words=choices[name], counted=True) for name in choices]
    pattern = card.pattern
    full = 0 if pattern is None or pattern.full_rotates else pattern.full_layers(card.layers)
    if full:
        said = f"{full} of {card.layers} layers have no rotation: the stage's RoPE setting "
        said += "changes only the others"
        facts.append(ExtensionFact(name="unrotated_layers", words=said))
    tp, cp = (1, 1) if layout is None else (layout.tp, layout.cp.size)
    kv_heads = card.kv_heads // tp
    repeated = kv_heads > 0 and fits_ulysses(card.heads // tp, kv_heads, cp)
    if tp * cp > card.kv_heads and not repeated:
        heads = "1 KV head is" if card.kv_heads == 1 else f"{card.kv_heads} KV heads are"
        said = f"{heads} fewer than TP x CP = {tp * cp}: Ulysses alone cannot share a sequence "
        said += "among these ranks, so ring or hybrid does"
        facts.append(ExtensionFact(name="ulysses", words=said))
    return facts


def _choices(card: ModelCard, length: int | None) -> Iterator[tuple[str, str]]:
    """Yield OlmPool's choices that a card has, by name."""
    if card.facts.qk_norm:
        yield "qk_norm", "queries and keys are normalised (QK norm)"
    queries = card.heads // card.kv_heads
    if queries > MOST_QUERIES:
        said = f"few KV heads: {queries} query heads share each of {card.kv_heads} (more than "
        yield "kv_heads", f"{said}{MOST_QUERIES}, Llama-3-8B's)"
    if card.native_context < LEAST_CONTEXT:
        said = f"a short native context: {card.native_context:,} tokens (fewer than "
        yield "native_context", f"{said}{LEAST_CONTEXT:,}, Llama-3's)"
    window = None if card.pattern is None else card.pattern.window
    if card.pattern is not None and window is not None and (length is None or window < length):
        full = card.pattern.full_layers(card.layers)
        said = f"{card.layers - full} of {card.layers} layers attend within a window of "
        said += f"{window:,} tokens, so only the other {full} can reach a longer context"
        yield "window", said


def lines(facts: list[ExtensionFact]) -> list[str]:
    """Return a line for each fact, and before them how many of OlmPool's choices add up."""
    number = sum(fact.counted for fact in facts)
    adds = "three or more cost much" if number > 2 else "fewer than three cost little"
    head = f"{number} of {CHOICES} choices that add up to make extension hard (OlmPool): {adds}"
    return [*([head] if number else []), *(fact.words for fact in facts)]
