# SPDX-License-Identifier: Apache-2.0
"""The rotation and the native context of a model by its config.json, as all commands read them.

The native context is what the model was trained for; a file may not tell it:

| rotation | native context | told, if |
| --- | --- | --- |
| plain, llama3, longrope | max_position_embeddings | another length field disagrees |
| linear | the same, or that times the factor (`is_extended`) | the original length is not stated |
| dynamic | max_position_embeddings times the factor | the original length is not stated |
| yarn | the original length times the factor | max_position_embeddings is another length |

An export of Longhaul states the context that its stage trained for, so nothing is told of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config_fields import LONGEST, mapping, whole
from recipes.hugging_face.family_defaults import HF_DEFAULTS
from recipes.hugging_face.layers import full_rope_of
from recipes.hugging_face.rope import (
    ORIGINAL,
    OTHER_LENGTHS,
    RECORD,
    head_dim_of,
    is_extended,
    rope_of,
    stated_in,
)
from recipes.hugging_face.rope_parameters import KINDS, rope_fields_by_kind
from recipes.hugging_face.unread_fields import require_positions
from recipes.spec.families import FAMILIES

OF_ROPE = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", LONGEST, ORIGINAL,
    RECORD,
)  # fmt: skip
"""Fields of config.json that depend on the rotation and the length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationFacts:
    """What a config.json of any family says of positions."""

    rope: RopeScaling
    """That of full layers where kinds differ."""
    head_dim: int
    native_context: int
    other_contexts: tuple[int, ...]
    """Other readings of the native context that the file allows."""
    notes: tuple[str, ...]


def rotation_of(config: Mapping[str, Any]) -> RotationFacts:
    """Return the rotation and the native context that a config.json states.

    Raises ValueError, with its name, for a field that is unknown or that disagrees with another,
    and for positions that are not computed here.
    """
    require_positions(config)
    rope = native_rope(config)
    stated = {key: value for key, value in config.items() if key != "layer_types"}
    context, others = native_context(stated, rope)
    return RotationFacts(
        rope=rope,
        head_dim=head_dim_of(_completed(config)),
        native_context=context,
        other_contexts=others,
        notes=tuple(rotation_notes(stated, rope)),
    )


def native_rope(config: Mapping[str, Any]) -> RopeScaling:
    """Return the rotation of a model, by the rules of its family; raises ValueError as `rope_of`.

    For a family that is not trained here, what config.json leaves out is that of transformers.
    """
    for family in FAMILIES.values():
        if family.model_type == config.get("model_type"):
            read = full_rope_of if family.windowed else rope_of
            return read(config, HF_DEFAULTS[family.name].rotated)
    completed = _completed(config)
    part = completed.get("rotary_pct")
    if completed.get("rotary_dim") is not None:
        part = whole(completed, "rotary_dim") / head_dim_of(completed)
    return rope_of(completed, 1.0 if part is None else part)


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the head size and rotated part that its class in transformers has."""
    kind = config.get("model_type")
    if kind is None or any(family.model_type == kind for family in FAMILIES.values()):
        return config
    from recipes.hugging_face.as_computed import head_facts  # imports torch

    completed = head_facts({key: value for key, value in config.items() if key not in OF_ROPE})
    if "rotary_emb_base" in config:  # GPT-NeoX
        completed["rope_theta"] = config["rotary_emb_base"]
    return completed | dict(config)


def native_context(config: Mapping[str, Any], rope: RopeScaling) -> tuple[int, tuple[int, ...]]:
    """Return the native context in tokens, and other values that the file can be read as.

    `rope` is what was read of the same config. Raises ValueError for a length that is not a whole
    number.
    """
    longest = whole(config, LONGEST)
    reach, original = rope.reach or longest, rope.original_length
    if mapping(config, RECORD) == rope.to_dict():
        return (reach if rope.method in ("linear", "dynamic") else longest), ()
    kinds = rope_fields_by_kind(config)
    fields = kinds.get(KINDS[0]) or next(one for one in kinds.values() if one is not None)
    unstated = stated_in(fields, config, ORIGINAL).get(ORIGINAL) is None
    finetuned = fields.content.get("finetuned") is not False
    context, others = longest, {config.get(key) for key in OTHER_LENGTHS}
    if rope.method in ("dynamic", "yarn"):
        context = reach
        others.add(longest if unstated or longest != original else None)
        others.add(None if finetuned else original)
    elif rope.method == "linear":
        extended = unstated and is_extended(config, rope.factor)
        context = longest if extended else reach
        others |= {int(longest * rope.factor)} if extended else {longest}
    lengths = {one for one in others if type(one) is int and one > 0}
    doubtful = unstated and rope.method in ("dynamic", "yarn")
    known = {context} if doubtful or not finetuned else {context, original}
    return context, tuple(sorted(lengths - known))


def rotation_notes(config: Mapping[str, Any], rope: RopeScaling) -> list[str]:
    """Return what libraries differ in about the stated rotation, a sentence each.

    `rope` is what `rope_of` reads. Raises ValueError as it does for fields that disagree.
    """
    found = []
    for fields in rope_fields_by_kind(config).values():
        if fields is None:
            continue
        if stated_in(fields, config, "rope_theta").get("rope_theta") is None:
            found.append(
                "its config.json states no rope_theta; the base is that of transformers for "
                f"{config.get('model_type')}, {rope.base:,}"
            )
        ignored = [key for key in ("attn_factor", "short_mscale") if fields.content.get(key)]
        if not ignored or fields.content.get("attention_factor") is not None:
            continue
        theirs = replace(rope, attention_factor=None).temperature
        if theirs != rope.temperature:
            found.append(
                f"its config.json has {ignored[0]} {fields.content[ignored[0]]}, which gives a "
                f"temperature of {rope.temperature:.5f}, as in SGLang; transformers ignores it and "
                f"computes {theirs:.5f}. An export states ours as attention_factor, which it reads"
            )
    return list(dict.fromkeys(found))
