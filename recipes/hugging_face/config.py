# SPDX-License-Identifier: Apache-2.0
"""Read config.json into a model card, check it against the weights, write it for a new length.

It is read as JSON; code that it names is never run. Every field that changes what the model
computes is either in the card or has the only value that our model supports. Any other value is
refused by name, since ignoring a field would give a different model. All commands read a rotation
and a native context by `positions.rotation_of`.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from data.files.user_file import read_json
from recipes.hugging_face.config_fields import CONFIG as CONFIG
from recipes.hugging_face.config_fields import number, whole, words
from recipes.hugging_face.family_defaults import HF_DEFAULTS, HfDefaults
from recipes.hugging_face.layers import (
    OF_LAYERS,
    layer_fields,
    local_rope_fields,
    pattern_of,
)
from recipes.hugging_face.positions import OF_ROPE, RotationFacts, rotation_of
from recipes.hugging_face.rope import (
    OTHER_LENGTHS,
    RECORD,
    rope_fields,
    rope_of,
)
from recipes.hugging_face.safetensors_files import Stored
from recipes.hugging_face.unread_fields import (
    Fields,
    require_computed,
    stated_again,
    unread_notes,
)
from recipes.hugging_face.weight_map import weight_map
from recipes.spec.families import FAMILIES, Family
from recipes.spec.model_card import ModelCard

_READ_IN_COPIES = (*OF_ROPE, *OTHER_LENGTHS, *OF_LAYERS)
"""Fields that are also read in copies of a config, where reading is not noticed."""

MOST_LAYERS, LARGEST = 10_000, 2**24
"""Maximum of layers or experts, and of matrix dimensions: models have less than a hundredth."""

ROTATION = ("native_context", "native_rope")
"""Fields of a card that training changes."""

_NOT_FACTS = (
    "name",
    "init_std",
    "config_class",
    "config_contexts",
    "stated_context",
    "other_contexts",
    "config_notes",
    "hf_id",
    "hf_revision",
    "source",
    "path",
    "start",
)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a Hugging Face folder; raise ValueError if there is none."""
    file = folder / CONFIG
    if not file.exists():
        raise ValueError(f"{folder} has no {CONFIG}; name the folder of a Hugging Face model")
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object; name the folder of a Hugging Face model")
    return content


def card_of(config: Mapping[str, Any], name: str, hf_id: str | None = None) -> ModelCard:
    """Return the card of a model with this config.json.

    Raises ValueError, with its name, for an unsupported architecture, rotation or field value, and
    for a field that nothing here reads and that may change the computation. Other fields that
    nothing reads are in the card's notes.
    """
    read = Fields(config)
    card = _card(read, name, hf_id)
    unread = {key: config[key] for key in config if key not in (*read.names, *_READ_IN_COPIES)}
    again = stated_again(unread, card)
    unread = {key: value for key, value in unread.items() if key not in again}
    require_computed(unread, card)
    return replace(card, config_notes=(*card.config_notes, *unread_notes(unread)))


def _card(config: Mapping[str, Any], name: str, hf_id: str | None) -> ModelCard:
    family = _family(config)
    unstated = HF_DEFAULTS[family.name]
    _refuse(config, family)
    heads = whole(config, "num_attention_heads")
    kv_heads = whole(
        config,
        "num_key_value_heads",
        heads if unstated.kv_heads == "all heads" or "num_key_value_heads" in config else None,
    )
    if unstated.head_dim == "must be stated":
        whole(config, "head_dim")
    positions = rotation_of(config)
    _require_rotation(positions, unstated)
    pattern = pattern_of(config, family.name, positions.rope) if family.patterned else None
    return ModelCard(
        name=name,
        family=family.name,
        layers=whole(config, "num_hidden_layers", most=MOST_LAYERS),
        hidden=whole(config, "hidden_size", most=LARGEST),
        ffn_hidden=whole(config, unstated.ffn, most=LARGEST),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=positions.head_dim,
        vocab=whole(config, "vocab_size", most=LARGEST),
        tied_embeddings=bool(config.get("tie_word_embeddings", unstated.tied)),
        norm_epsilon=number(config, unstated.norm_epsilon),
        init_std=number(config, "initializer_range", unstated.init_std),
        native_context=positions.native_context,
        other_contexts=positions.other_contexts,
        native_rope=positions.rope,
        config_notes=positions.notes,
        pattern=pattern,
        hf_id=hf_id,
        source=f"{CONFIG} of {hf_id or name}",
        experts=whole(config, unstated.experts) if family.experts else 0,
        experts_per_token=whole(config, "num_experts_per_tok") if family.experts else 0,
    )


def _family(config: Mapping[str, Any]) -> Family:
    stated = config.get("model_type")
    named = words(config, "architectures")
    for family in FAMILIES.values():
        if family.model_type == stated and all(name == family.architecture for name in named):
            return family
    known = ", ".join(f"{one.model_type} ({one.architecture})" for one in FAMILIES.values())
    raise ValueError(
        f"{CONFIG} has model_type {stated!r} and architectures {named}; known here are {known}"
    )


def _refuse(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for a field value that our model does not support."""
    only = {
        HF_DEFAULTS[family.name].activation: family.activation,
        "attention_bias": False,
        "mlp_bias": False,
        "quantization_config": None,
        "auto_map": None,
    }
    why = {
        "quantization_config": "; dequantize it to bfloat16 first",
        "auto_map": "; code from a repository is not run here",
    }
    for key, value in only.items():
        if key in config and config[key] != value:
            raise ValueError(
                f"{CONFIG} has {key} {config[key]!r}; the {family.architecture} trained here has "
                f"{value!r}{why.get(key, '')}"
            )
    unstated = HF_DEFAULTS[family.name]
    for key, meant, value in unstated.only:
        stated = meant if config.get(key) is None else config[key]
        if stated != value:
            raise ValueError(
                f"{CONFIG} has {key} {stated!r}{'' if key in config else ', being unstated'}; the "
                f"{family.architecture} trained here has {value!r}"
            )
    _refuse_scaling(config, family)
    if family.name == "gemma3" and config.get("query_pre_attn_scalar", 256) != config.get(
        "head_dim"
    ):
        raise ValueError(
            f"{CONFIG} has query_pre_attn_scalar {config.get('query_pre_attn_scalar', 256)!r} and "
            f"head_dim {config.get('head_dim')!r}; attention here divides by the root of the head "
            "size, so they must be equal, as in all sizes of Gemma 3 but 27B"
        )
    if family.patterned:
        return  # `pattern_of` reads windows and kinds of layers
    window = config.get("sliding_window", unstated.window)
    if unstated.window_switch and not config.get("use_sliding_window", False):
        window = None
    kinds = set(words(config, "layer_types")) - {"full_attention"}
    if window is not None or kinds:
        raise ValueError(
            f"{CONFIG} has a sliding window in use (sliding_window {window}, layer_types "
            f"{', '.join(sorted(kinds)) or 'not stated'}); attention here is over the whole "
            "context, so set sliding_window to null only where the weights were trained without it"
        )


def _refuse_scaling(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for a stretched rotation of a family that is not computed with one."""
    if HF_DEFAULTS[family.name].reads_scaling:
        return
    method = rope_of({key: value for key, value in config.items() if key != RECORD}).method
    if method != "default":
        raise ValueError(
            f"{CONFIG} has rope_scaling {method}, which {family.architecture} of transformers 4 "
            "ignores, so it would compute something else; a model of this family is stretched "
            "by its base alone (default or ntk)"
        )


def _require_rotation(positions: RotationFacts, unstated: HfDefaults) -> None:
    rope = positions.rope
    _refuse_part(rope, unstated)
    pairs = int(positions.head_dim * rope.partial_rotary_factor) // 2
    for name in ("short_factor", "long_factor"):
        factors = getattr(rope, name)
        if factors is not None and len(factors) != pairs:
            raise ValueError(
                f"{CONFIG} has {len(factors)} numbers in {name}, and {pairs} pairs of dimensions "
                "are rotated; it takes one for each"
            )


def _refuse_part(rope: RopeScaling, unstated: HfDefaults) -> None:
    if rope.partial_rotary_factor != 1 and unstated.rotated == 1:
        raise ValueError(
            f"partial_rotary_factor is {rope.partial_rotary_factor}, and the family's model in "
            "transformers rotates whole heads; of these families only Nemotron rotates a part"
        )


def require_weights(card: ModelCard, stored: Mapping[str, Stored]) -> None:
    """Raise ValueError unless the tensors have the names and shapes of the card."""
    wanted = {
        name: (shape, piece.megatron)
        for piece in weight_map(card)
        for name, shape in zip(piece.hugging_face, piece.shapes, strict=True)
    }
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ValueError(
            f"the weights lack {len(missing)} of the {len(wanted)} tensors of a {card.family} "
            f"model, {missing[0]} the first"
        )
    unknown = [name for name in stored if name not in wanted and not _redundant(name, card)]
    if unknown:
        raise ValueError(
            f"the weights have {len(unknown)} tensors that a {card.family} model here does not "
            f"have, {unknown[0]} the first; they would be lost"
        )
    firsts: dict[str, str] = {}
    for name, (shape, megatron) in wanted.items():
        if stored[name].shape != shape:
            raise ValueError(f"{name} is {stored[name].shape}; by {CONFIG} it would be {shape}")
        first = firsts.setdefault(megatron, name)  # over all layers and experts
        if stored[name].dtype != stored[first].dtype:
            raise ValueError(
                f"{name} is {stored[name].dtype} and {first} {stored[first].dtype}; Megatron has "
                "them as one tensor, so they need one dtype"
            )


def _redundant(name: str, card: ModelCard) -> bool:
    """Return whether a tensor is redundant: a tied LM head, or the frequencies in old files."""
    tied = card.tied_embeddings and name == "lm_head.weight"
    return tied or name.endswith(".rotary_emb.inv_freq")


def require_same(card: ModelCard, other: ModelCard, what: str, but: Collection[str] = ()) -> None:
    """Raise ValueError with each fact in which a model differs from the card.

    Names, sources, the width of initial weights and the facts in `but` are not compared. A native
    context may be the card's own or another value of its published config.json. Numbers are the
    same if they are in fp32, in which GGUF stores them.
    """
    if other.native_context in card.config_contexts:
        but = (*but, "native_context")
    differing = [
        f"{name} is {_said(theirs)} where {card.name} has {_said(mine)}"
        for name in (field.name for field in fields(card))
        if name not in (*_NOT_FACTS, *but)
        and not _same(mine := getattr(card, name), theirs := getattr(other, name))
    ]
    if differing:
        raise ValueError(f"{what} is not {card.name}: {'; '.join(differing)}")


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=2.0**-23)
    return bool(mine == theirs)


def _said(fact: Any) -> str:
    if isinstance(fact, LayerPattern):
        return fact.describe()
    return str(fact.to_dict() if isinstance(fact, RopeScaling) else fact)


def exported_config(
    base: Mapping[str, Any] | None, card: ModelCard, rope: RopeScaling, length: int, dtype: str
) -> dict[str, Any]:
    """Return config.json of the card's model with rotation `rope` for up to `length` tokens.

    `base` is the original config.json, whose other fields are kept, or None. `dtype` is torch's
    name for that of the weights. Raises ValueError for a rotation that the family's model in
    transformers does not support.
    """
    config = dict(_made(card) if base is None else base)
    for key in (*OF_ROPE, *OTHER_LENGTHS, *(OF_LAYERS if card.facts.windowed else ())):
        if key != "partial_rotary_factor":  # kept where the original states whole heads
            config.pop(key, None)
    unstated = HF_DEFAULTS[card.family]
    _refuse_part(rope, unstated)
    of_rope = rope_fields(rope, head_dim=card.head_dim, length=length, rotated=unstated.rotated)
    config |= of_rope | local_rope_fields(card, of_rope) | layer_fields(card)
    _refuse_scaling(config, card.facts)
    for key in ("dtype", "torch_dtype"):
        if key in config or (key == "torch_dtype" and "dtype" not in config):
            config[key] = dtype
    return config


def _made(card: ModelCard) -> dict[str, Any]:
    unstated = HF_DEFAULTS[card.family]
    config = {
        "architectures": [card.facts.architecture],
        "model_type": card.facts.model_type,
        "num_hidden_layers": card.layers,
        "hidden_size": card.hidden,
        unstated.ffn: card.ffn_hidden,
        "num_attention_heads": card.heads,
        "num_key_value_heads": card.kv_heads,
        "head_dim": card.head_dim,
        "vocab_size": card.vocab,
        "tie_word_embeddings": card.tied_embeddings,
        unstated.activation: card.facts.activation,
        unstated.norm_epsilon: card.norm_epsilon,
        "initializer_range": card.init_std,
        "use_cache": True,
    }
    if unstated.window is not None:
        config["sliding_window"] = None
    if card.experts:
        config |= {unstated.experts: card.experts, "num_experts_per_tok": card.experts_per_token}
    if card.family == "gemma3":
        config["query_pre_attn_scalar"] = card.head_dim
    return config | {key: value for key, _, value in unstated.only}
