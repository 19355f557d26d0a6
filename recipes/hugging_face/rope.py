# SPDX-License-Identifier: Apache-2.0
"""Convert a rotation to the fields of Hugging Face's config.json, and back.

`rope_fields` writes the fields that transformers 4 and 5 and the serving engines use, so that all
of them rotate heads as in training: `rope_scaling` with `rope_theta` next to it, and the same as
`rope_parameters`. A method that they do not have is written as another with the same frequencies:

* `ntk` is plain RoPE with the resulting base;
* `ntk_by_parts` is `yarn` with its attention factor at 1;
* a rotation that stretches another (`RopeScaling.before`) is `longrope` with the same divisors for
  short and long sequences.

The temperature is always written, never left to a default. The full description is also stored
under `RECORD`. `rope_of` uses it if it agrees with the other fields, so that a rotation survives a
round trip.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config_fields import CONFIG, LONGEST, mapping, number, numbers, whole
from recipes.hugging_face.rope_parameters import NEW, OLD, RopeFields, rope_fields_by_kind

RECORD = "longhaul_rope"
"""Our own key in config.json; other libraries ignore it."""

OTHER_LENGTHS = (
    "max_sequence_length", "max_seq_length", "max_seq_len", "model_max_length", "n_positions",
    "n_ctx", "seq_length", "seq_len",
)  # fmt: skip
"""Fields of some configs in addition to max_position_embeddings; vLLM serves the smallest."""

BASE_WHERE_UNSTATED = {
    "mixtral": 1_000_000.0, "gemma3_text": 1_000_000.0, "smollm3": 2_000_000.0,
}  # fmt: skip
"""Default of the config class in transformers, if not 10,000."""

ORIGINAL = "original_max_position_embeddings"
SHORTEST = 2048
"""Tokens that no model was pretrained on fewer of; Llama 1 was on as many."""
ROUNDING = 1e-3
"""Relative difference of two temperatures that is rounding."""

_SHAPE = ("model_type", "hidden_size", "num_attention_heads", "head_dim")
"""Fields that the reading of a rotation depends on, besides its own."""

_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_KEYS = {
    "default": (),
    "linear": ("factor", ORIGINAL),
    "dynamic": ("factor", ORIGINAL),
    "yarn": (
        "factor", ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
        "mscale_all_dim", "attn_factor", "finetuned",
    ),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "longrope": (
        "factor", ORIGINAL, "short_factor", "long_factor", "attention_factor", "short_mscale",
        "long_mscale",
    ),
}  # fmt: skip
"""Fields of each method; every one changes the rotation or the native context."""


def rope_of(config: Mapping[str, Any], rotated: float = 1.0) -> RopeScaling:
    """Return the rotation of a model with this config.json.

    `rotated` is the family's `partial_rotary_factor` if the config states none. Raises ValueError,
    with its name, for an unknown rotation or parameter, for two fields that disagree, and for kinds
    of layers that rotate differently, which `rotations_of` reads.
    """
    rotations = rotations_of(config, rotated)
    found, *others = rotations.values()
    if found is None or any(other != found for other in others):
        raise ValueError(
            f"{NEW} of {CONFIG} has {_listed(rotations)}; every layer of a model of this family "
            "rotates heads in the same way here"
        )
    record = mapping(config, RECORD)
    if not record:
        return found
    recorded = RopeScaling.from_dict(record)
    return recorded if _reads_as(recorded, config, rotated) == found else found


def rotations_of(config: Mapping[str, Any], rotated: float = 1.0) -> dict[str, RopeScaling | None]:
    """Return the rotation of each kind of layer, None for a kind without one.

    Kinds are named as in `layer_types`; a config that does not tell layers apart has one entry,
    `full_attention`. Raises ValueError like `rope_of`.
    """
    return {
        kind: None if fields is None else _stated(fields, config, rotated)
        for kind, fields in rope_fields_by_kind(config).items()
    }


def _listed(rotations: Mapping[str, RopeScaling | None]) -> str:
    return " and ".join(
        f"{kind} ({'no rotation' if rope is None else f'{rope.method}, base {rope.base:,}'})"
        for kind, rope in rotations.items()
    )


def _reads_as(recorded: RopeScaling, config: Mapping[str, Any], rotated: float) -> RopeScaling:
    """Return what others read of an export of the recorded rotation with this config's shape."""
    shape = {key: config[key] for key in _SHAPE if key in config}
    length = whole(config, LONGEST, 1)
    fields = rope_fields(recorded, head_dim=head_dim_of(config), length=length, rotated=rotated)
    del fields[RECORD]
    return rope_of(shape | json.loads(json.dumps(fields)), rotated)


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the size of the heads that rotate; raise ValueError if the config does not state it.

    Multi-head latent attention (DeepSeek) rotates a part of each head that is a field of its own.
    """
    for key in ("qk_rope_head_dim", "head_dim"):
        if config.get(key) is not None:
            return whole(config, key)
    return whole(config, "hidden_size") // whole(config, "num_attention_heads")


def _stated(fields: RopeFields, config: Mapping[str, Any], rotated: float) -> RopeScaling:
    """Return the rotation of the standard fields, by the rules of transformers."""
    scaling, method = fields.content, _method(fields)
    if method not in _KEYS:
        raise ValueError(
            f"{fields.name} of {CONFIG} has rope_type {method!r}, which is not known here; "
            f"known are {', '.join(_KEYS)}"
        )
    strange = [key for key in scaling if key not in (*_COMMON, *_KEYS[method])]
    if strange:
        raise ValueError(
            f"{fields.name} of {CONFIG} has {', '.join(strange)}, which rope_type {method} does "
            f"not take here; it takes {', '.join(_KEYS[method]) or 'nothing'}"
        )
    unstated = BASE_WHERE_UNSTATED.get(str(config.get("model_type")), 10_000.0)
    given: dict[str, Any] = {
        "method": method,
        "base": _whole(number(stated_in(fields, config, "rope_theta"), "rope_theta", unstated)),
        "partial_rotary_factor": number(
            stated_in(fields, config, "partial_rotary_factor"), "partial_rotary_factor", rotated
        ),
    }
    if method == "default":
        return RopeScaling(**given)
    given["factor"] = _factor(fields, config, method)
    given["original_length"] = _original(fields, config, method)
    if method == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            given[key] = number(_having(fields, key, method), key)
    if method == "longrope":
        for key in ("short_factor", "long_factor"):
            given[key] = numbers(_having(fields, key, method), key)
    if method == "yarn":
        given |= {
            key: number(scaling, key) for key in ("beta_fast", "beta_slow") if scaling.get(key)
        }
        given["truncate"] = bool(scaling.get("truncate", True))
        for key in ("mscale", "mscale_all_dim"):
            given[key] = number(scaling, key) if scaling.get(key) else None  # 0 means not set
    found = RopeScaling(**given)
    temperature = _temperature(fields, found)
    # The method's own is the default of a card: stated or not, it is one rotation.
    own = temperature == found.temperature
    return found if own else replace(found, attention_factor=temperature)


def _temperature(fields: RopeFields, own: RopeScaling) -> float:
    """Return the temperature, from whichever field states it; those that do must agree.

    transformers reads `attention_factor`. YaRN's own code, SGLang and older releases of vLLM
    multiply the paper's temperature by `attn_factor`; their longrope has `short_mscale` and
    `long_mscale`.
    """
    stated: dict[str, float] = {}
    for key in ("attention_factor", "short_mscale", "long_mscale", "attn_factor"):
        if fields.content.get(key) is not None:
            value = number(fields.content, key)
            stated[key] = own.temperature * value if key == "attn_factor" else value
    (first, meant), *others = [*stated.items()] or [("", own.temperature)]
    for key, value in others:
        if not math.isclose(value, meant, rel_tol=ROUNDING):
            raise ValueError(
                f"{fields.name} of {CONFIG} has {first} {fields.content[first]}, a temperature of "
                f"{meant:.6g}, and {key} {fields.content[key]}, one of {value:.6g}; leave one of "
                "them"
            )
    return meant


def _method(fields: RopeFields) -> str:
    """Return the method by `rope_type` or its former name `type`; they must agree.

    transformers 4.57 computes by `type` for Llama and Qwen and by `rope_type` for Mistral.
    """
    former, content = {"su": "longrope"}, fields.content
    words = [str(content[key]) for key in ("rope_type", "type") if content.get(key) is not None]
    methods = [former.get(word, word) for word in words]
    if len(set(methods)) > 1:
        raise ValueError(
            f"{fields.name} of {CONFIG} has rope_type {words[0]!r} and type {words[1]!r}, and "
            "models differ in which of them they compute by; leave one of them"
        )
    return methods[0] if methods else "default"


def stated_in(fields: RopeFields, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping with a field: that of the rotation or the config; both must agree.

    The fields of one kind of layer outrank the config's, which are those of another kind.
    """
    inside, beside = fields.content.get(key), config.get(key)
    of_one_kind = fields.name not in (OLD, NEW)
    if inside is not None and beside is not None and inside != beside and not of_one_kind:
        raise ValueError(
            f"{CONFIG} has {key} {beside!r} and in {fields.name} {inside!r}; they must be equal"
        )
    return config if inside is None else fields.content


def _having(fields: RopeFields, key: str, method: str) -> Mapping[str, Any]:
    if fields.content.get(key) is None:
        raise ValueError(f"{fields.name} of {CONFIG} has no {key}, which rope_type {method} needs")
    return fields.content


def _original(fields: RopeFields, config: Mapping[str, Any], method: str) -> int:
    """Return the context before extension, from the field that transformers uses."""
    stated = stated_in(fields, config, ORIGINAL)
    if stated.get(ORIGINAL) is None or method == "dynamic":
        if config.get(LONGEST) is None:
            raise ValueError(f"{CONFIG} has neither {ORIGINAL} nor {LONGEST}")
        found = whole(config, LONGEST)
        if method == "dynamic" and stated.get(ORIGINAL) not in (None, found):
            raise ValueError(
                f"{CONFIG} has {ORIGINAL} {stated[ORIGINAL]!r} and transformers computes rope_type "
                f"dynamic from {LONGEST} {found:,}; they must be equal"
            )
        factor = _factor(fields, config, method)
        extended = method == "linear" and is_extended(config, factor)
        return max(1, round(found / factor)) if extended else found
    return whole(stated, ORIGINAL)


def is_extended(config: Mapping[str, Any], factor: float) -> bool:
    """Whether max_position_embeddings of a config with `linear` is the length after extension.

    Most authors write it so (LongChat, DeepSeek Coder, Gemma 3), and frequencies do not depend on
    it. It is the length before if another field states the product, or if a quotient would be
    shorter than any model was pretrained on (Vicuna 16K).
    """
    longest = whole(config, LONGEST)
    others = [config.get(key) for key in OTHER_LENGTHS]
    return longest * factor not in others and longest / factor >= SHORTEST


def _factor(fields: RopeFields, config: Mapping[str, Any], method: str) -> float:
    if method == "longrope" and config.get(ORIGINAL) is not None:
        # transformers 4 uses the ratio and ignores factor
        return whole(config, LONGEST) / whole(config, ORIGINAL)
    return number(_having(fields, "factor", method), "factor")


def _whole(base: float) -> float:
    """Return a base as cards write it: 500000.0 and 500000 are the same rotation."""
    return int(base) if base.is_integer() else base


def rope_fields(
    rope: RopeScaling, *, head_dim: int, length: int, rotated: float = 1.0
) -> dict[str, Any]:
    """Return the fields of config.json for a model with this rotation up to `length` tokens.

    A value of None means null. `rotated` is the family's default of `partial_rotary_factor`, which
    is stated unless whole heads rotate by both: other libraries have other defaults.
    Raises ValueError for interleaved pairs, which no family's Hugging Face model supports.
    """
    if rope.interleaved:
        raise ValueError(
            "the rotation pairs dimensions 2i and 2i + 1 (interleaved), and Hugging Face's models "
            "of these families pair i with i + R/2; its weights would have to be permuted"
        )
    fields: dict[str, Any] = {
        "rope_theta": float(rope.base),
        "rope_scaling": _scaling(rope, head_dim),
        LONGEST: length,
        RECORD: rope.to_dict(),
    }
    if (rope.partial_rotary_factor, rotated) != (1, 1):
        fields["partial_rotary_factor"] = rope.partial_rotary_factor
    stretches_another = rope.before is not None and rope.before.method != "default"
    if rope.method != "default" and not stretches_another:
        # With one set of divisors (stretches_another) vLLM would serve up to this length alone.
        fields[ORIGINAL] = rope.original_length
        if rope.method == "ntk":
            turned = int(head_dim * rope.partial_rotary_factor)
            fields["rope_theta"] = rope.base * rope.factor ** (turned / (turned - 2))
        if rope.method in ("linear", "dynamic"):
            # vLLM and SGLang serve these two up to this field times the factor, and transformers
            # computes dynamic from it.
            fields[LONGEST] = rope.original_length
    fields[NEW] = _parameters(fields)
    return fields


def _parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of transformers 5: base and rotated part are inside."""
    inside = ("rope_theta", "partial_rotary_factor")
    return {
        **(fields[OLD] or {"rope_type": "default"}),
        **{key: fields[key] for key in inside if key in fields},
    }


def _scaling(rope: RopeScaling, head_dim: int) -> dict[str, Any] | None:
    """Return `rope_scaling`, or None for plain RoPE."""
    if rope.before is not None and rope.before.method != "default":
        return _divided(rope, head_dim)
    original = {ORIGINAL: rope.original_length}
    match rope.method:
        case "default" | "ntk":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": float(rope.factor)}
        case "dynamic":
            # Without the original length, with which SGLang would not multiply by the factor.
            return {"rope_type": "dynamic", "factor": float(rope.factor)}
        case "llama3":
            return {
                "rope_type": "llama3",
                "factor": float(rope.factor),
                "low_freq_factor": float(rope.low_freq_factor),
                "high_freq_factor": float(rope.high_freq_factor),
                **original,
            }
        case "longrope":
            return {
                "rope_type": "longrope",
                "factor": float(rope.factor),
                "short_factor": rope.short_factor,
                "long_factor": rope.long_factor,
                **_temperature_of_longrope(rope.temperature),
                **original,
            }
    scaling = {
        "rope_type": "yarn",
        "factor": float(rope.factor),
        **original,
        "beta_fast": float(rope.beta_fast),
        "beta_slow": float(rope.beta_slow),
        "attention_factor": rope.temperature,
    }
    paper = 0.1 * math.log(rope.factor) + 1
    if rope.temperature != paper:
        scaling["attn_factor"] = (
            rope.temperature / paper
        )  # for engines that multiply the paper's by it
    if not rope.truncate:
        scaling["truncate"] = False
    return scaling


def _temperature_of_longrope(temperature: float) -> dict[str, float]:
    """Return the temperature under the keys of transformers, vLLM and SGLang."""
    return {
        "attention_factor": temperature,
        "short_mscale": temperature,
        "long_mscale": temperature,
    }


def _divided(rope: RopeScaling, head_dim: int) -> dict[str, Any]:
    """Return the fields of a rotation that stretches another, as divisors of plain RoPE."""
    from custom_modules.rope.rotary import inverse_frequencies  # imports torch

    frequencies, temperature = inverse_frequencies(rope, head_dim)
    plain, _ = inverse_frequencies(
        RopeScaling(
            method="default", base=rope.base, partial_rotary_factor=rope.partial_rotary_factor
        ),
        head_dim,
    )
    divisors = (plain / frequencies).tolist()
    return {
        "rope_type": "longrope",
        "factor": float(rope.factor),
        "short_factor": divisors,
        "long_factor": divisors,
        **_temperature_of_longrope(temperature),
        ORIGINAL: rope.original_length,
    }
