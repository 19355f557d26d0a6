# SPDX-License-Identifier: Apache-2.0
"""Whether the rotations of a ladder are right for a card, and the same for another base."""

from dataclasses import replace

from custom_modules.rope.config import RopeScaling
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import length_shown
from recipes.spec.stage import Ladder, Stage

BY_FORMULA = ("linear", "ntk", "dynamic", "ntk_by_parts", "yarn", "llama3")
"""Methods that are defined for any base and context; longrope's divisors are found by search."""


def for_card(ladder: Ladder, card: ModelCard, only: int = 0) -> tuple[Ladder, list[str]]:
    """Return the ladder with rotations for a card, and a sentence for each that does not suit it.

    A ladder for its own cards stays as it is, and so does a user's file that names no cards. For
    another card a method with a formula keeps the context that it reaches, from the card's own base
    and context; a base alone stays, also over another scaling. With `only` a length, the other
    stages are left as they are. Raises ValueError for a rotation that the card cannot have.
    """
    for_it = card.name in ladder.cards or (bool(ladder.path) and not ladder.cards)
    checked = [stage for stage in ladder.stages if only in (0, stage.seq_length)]
    said = [words for stage in checked for words in _of_own(card, ladder, stage)]
    if for_it:
        for stage in checked:
            require_heads(card, ladder, stage)
        return ladder, said
    stages = []
    for stage in ladder.stages:
        why = rotation_refusal(card, stage)
        from_scratch = "scratch" in (stage.start, ladder.stages[0].start)
        if why is None or from_scratch or only not in (0, stage.seq_length):
            stages.append(stage)
            continue
        of_stage = f"stage {length_shown(stage.seq_length)} of ladder {ladder.name}: {why}"
        if _replaces_scaling(card, stage):
            said.append(of_stage)
            stages.append(stage)
            continue
        rope = _recomputed(card, ladder, stage, why)
        said.append(f"{of_stage}; its rotation is recomputed for {card.name}: {_in_words(rope)}")
        stages.append(replace(stage, rope=rope))
    return replace(ladder, stages=tuple(stages)), said


def _of_own(card: ModelCard, ladder: Ladder, stage: Stage) -> list[str]:
    """Return what is worth a note about a stage of a user's ladder; of a shipped one nothing.

    Raises ValueError for a first stage within the card's context, and for a rotation that does not
    reach the stage's. What Llama 3's scaling reaches is not stated by its factor, so it is not
    checked.
    """
    native, shown = card.native_context, length_shown(stage.seq_length)
    if not ladder.path or "scratch" in (stage.start, ladder.stages[0].start):
        return []
    if stage.start == "card" and stage.target_length < native:
        raise ValueError(
            f"ladder {ladder.name} trains {card.name} at {shown}, and its context is {native:,} "
            "tokens already; begin with a longer stage"
        )
    reach = native if stage.rope == "native" else stage.rope.reach
    if stage.rope != "native" and stage.rope.method == "llama3":
        reach = None
    if reach is not None and reach < native:
        raise ValueError(
            f"ladder {ladder.name}: the rotation of stage {shown} reaches {reach:,} tokens and the "
            f"context of {card.name} is {native:,} already; leave the stage out, or use rope: "
            "native"
        )
    if reach is None or reach >= stage.target_length:
        return _of_another_base(card, ladder, stage)
    if stage.rope == "native":
        return [
            f"stage {shown} of ladder {ladder.name} keeps the rotation of {card.name}, which was "
            f"trained at {native:,} tokens"
        ]
    raise ValueError(
        f"ladder {ladder.name}: the rotation of stage {shown} reaches {reach:,} tokens and the "
        f"stage trains for {stage.target_length:,}; raise its factor"
    )


def _of_another_base(card: ModelCard, ladder: Ladder, stage: Stage) -> list[str]:
    """Return a note on a stage whose rotation begins at another base or context than the card's.

    Of the stages after it the card does not tell, since they begin where the stage before ends.
    """
    foreign = ladder.cards and card.name not in ladder.cards  # its rotations are recomputed
    why = None if foreign or stage.start != "card" else rotation_refusal(card, stage)
    if why is None:
        return []
    shown = length_shown(stage.seq_length)
    return [f"stage {shown} of ladder {ladder.name}: {why}; its rotation is kept as stated"]


def is_possible(ladder: Ladder, card: ModelCard, only: int) -> bool:
    """Return whether a card can be trained at a length of a ladder."""
    try:
        for_card(ladder, card, only)
    except ValueError:
        return False
    return True


def _replaces_scaling(card: ModelCard, stage: Stage) -> bool:
    """Return whether a stage has a base alone, above the card's, and the card a scaling."""
    rope, native = stage.rope, card.native_rope
    return (
        rope != "native"
        and heads_refusal(card, stage) is None
        and (rope.method, native.method) == ("default", "llama3")
        and rope.base >= native.base
    )


def _recomputed(card: ModelCard, ladder: Ladder, stage: Stage, why: str) -> RopeScaling:
    """Return the rotation of a stage for a card's base and context; ValueError if it has none."""
    rope, native = stage.rope, card.native_rope
    refused = f"ladder {ladder.name} cannot train {card.name} at {length_shown(stage.seq_length)}"
    assert rope != "native"
    if ladder.path:
        remedy = f"state its rotation for {card.name} in {ladder.path} and add it to `cards`"
    else:
        remedy = "write a ladder of your own for it: longhaul ladders new FILE"
    if rope.method == "longrope":
        raise ValueError(
            f"{refused}: {why}; the divisors of longrope are found for one model, by `longhaul "
            f"rope search`; {remedy}"
        )
    if rope.method == "default":
        same_base = replace(
            rope,
            partial_rotary_factor=native.partial_rotary_factor,
            interleaved=native.interleaved,
        )
        if rotation_refusal(card, replace(stage, rope=same_base)) is None:
            return same_base
    if rope.method not in BY_FORMULA or rope.before or native.method not in ("default", "llama3"):
        raise ValueError(f"{refused}: {why}; {remedy}")
    trained = native.original_length or card.native_context
    reach = rope.factor * (rope.original_length or 0)
    if reach <= card.native_context:
        raise ValueError(
            f"{refused}: the stage's rotation reaches {reach:,.0f} tokens and the card's context "
            f"is {card.native_context:,} already; leave the stage out, or use rope: native"
        )
    return replace(
        rope,
        base=native.base,
        original_length=trained,
        factor=reach / trained,
        attention_factor=None,
        partial_rotary_factor=native.partial_rotary_factor,
        interleaved=native.interleaved,
    )


def _in_words(rope: RopeScaling) -> str:
    if rope.original_length is None:
        return f"base {rope.base:,.10g} for {rope.partial_rotary_factor:g} of a head"
    return (
        f"{rope.method} by {rope.factor:g} from {length_shown(rope.original_length)} at base "
        f"{rope.base:,.10g}"
    )


def require_heads(card: ModelCard, ladder: Ladder, stage: Stage) -> None:
    """Raise ValueError where heads of a card cannot be turned by a stage's rotation at all."""
    refused = heads_refusal(card, stage)
    if refused is not None:
        raise ValueError(f"ladder {ladder.name} cannot train {card.name}: {refused}")


def rotation_refusal(card: ModelCard, stage: Stage) -> str | None:
    """Return why the rotation of a stage would be wrong for a card, or None."""
    rope, native = stage.rope, card.native_rope
    if rope == "native":
        return None
    of_heads = heads_refusal(card, stage)
    if of_heads is not None:
        return of_heads
    if native.method not in ("default", "llama3"):
        return f"{card.name} is stretched by {native.method} already"
    if rope.method == "default" and native.method == "llama3":
        return f"a base alone takes away the scaling that {card.name} was trained with"
    if rope.method == "default":
        replaced = rope.base >= native.base
        return None if replaced else f"base {rope.base:,.10g} is below that of {card.name}"
    if rope.before == native and rope.original_length == card.native_context:
        return None  # it stretches the card's own rotation further
    plain = native.original_length or card.native_context
    raised = rope.method == "llama3" and native.method == "default" and rope.base >= native.base
    if raised and rope.original_length == plain:
        return None  # a higher base as well, as Apertus has
    if (rope.base, rope.original_length) != (native.base, plain):
        return f"{card.name} was trained at base {native.base:,.10g} on {plain:,} tokens"
    return None


def heads_refusal(card: ModelCard, stage: Stage) -> str | None:
    """Return why heads of the card cannot be turned by a stage's rotation at all, or None."""
    rope, native = stage.rope, card.native_rope
    if rope == "native":
        return None
    if rope.partial_rotary_factor != native.partial_rotary_factor:
        return (
            f"{card.name} turns {native.partial_rotary_factor:g} of a head, and the rotation is "
            f"for {rope.partial_rotary_factor:g} of one"
        )
    if rope.long_factor is not None and 2 * len(rope.long_factor) != card.head_dim:
        divisors = len(rope.long_factor)
        return (
            f"its rotation has {divisors} divisors, for heads of {2 * divisors}, and heads of "
            f"{card.name} have {card.head_dim}"
        )
    return None


def of_other_cards(ladder: Ladder, card: ModelCard) -> str:
    """Return in a sentence that a ladder's rotations are for other cards; empty where they fit."""
    if not ladder.cards or card.name in ladder.cards:
        return ""
    return (
        f"ladder {ladder.name} is for {', '.join(ladder.cards)}; its rotations were not chosen for "
        f"{card.name}, which is trained at {card.native_context:,} tokens"
    )
