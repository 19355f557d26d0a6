# SPDX-License-Identifier: Apache-2.0
"""Layers that differ, as config.json states them, by the rules of transformers 4.57 and 5.

| family | kind of each layer | rotation of local layers |
| --- | --- | --- |
| smollm3 | `no_rope_layers`, 1 a layer that rotates | that of all |
| olmo3 | `layer_types`, and `sliding_window` | `rope_theta` alone, without `rope_scaling` |
| gemma3 | the same | `rope_local_base_freq` |

transformers 5 has the rotation of each kind in `rope_parameters` (`rope_parameters.py` here). A
model here has one kind of layer at every n-th place, as all published models of these families; a
list of any other form is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.hugging_face.config_fields import CONFIG, mapping, number, whole, words
from recipes.hugging_face.rope import rope_of, rotations_of
from recipes.hugging_face.rope_parameters import NEW
from recipes.spec.model_card import ModelCard

FULL, LOCAL = "full_attention", "sliding_attention"
EVERY = {"smollm3": 4, "olmo3": 4, "gemma3": 6}
"""Distance of full layers if config.json states no kinds, as in transformers."""
WINDOW = 4096
"""`sliding_window` where config.json states none, as in transformers."""
LOCAL_BASE = "rope_local_base_freq"
OF_LAYERS = ("layer_types", "sliding_window", "no_rope_layers", "no_rope_layer_interval",
             "sliding_window_pattern", "_sliding_window_pattern", LOCAL_BASE)  # fmt: skip
"""Fields of config.json that depend on the pattern."""


def full_rope_of(config: Mapping[str, Any], rotated: float) -> RopeScaling:
    """Return the rotation that a stage changes: that of full layers where kinds differ."""
    if not _by_kind(config):
        return rope_of(config, rotated)
    _require_rotation(config, FULL)
    plain = {key: value for key, value in config.items() if key != "layer_types"}
    return rope_of(plain | {NEW: mapping(config, NEW)[FULL]}, rotated)


def _by_kind(config: Mapping[str, Any]) -> bool:
    return not mapping(config, NEW).keys().isdisjoint((FULL, LOCAL))


def _require_rotation(config: Mapping[str, Any], kind: str) -> None:
    """Raise ValueError if `rope_parameters` by kind of layer have none for a kind that rotates."""
    new = mapping(config, NEW)
    if new.get(kind) is not None:
        return
    stated = "null" if kind in new else "nothing"
    why = ", which is no rotation" if kind in new else ""
    raise ValueError(
        f"{CONFIG} has {stated} for {kind} in {NEW}{why}; these layers of "
        f"{config.get('model_type')} rotate: state their rope_theta"
    )


def pattern_of(config: Mapping[str, Any], family: str, rope: RopeScaling) -> LayerPattern | None:
    """Return which layers differ; None if none does.

    `rope` is the model's own rotation. Raises ValueError for kinds that do not follow a period.
    """
    layers = whole(config, "num_hidden_layers")
    if family == "smollm3":
        return _unrotated(config, layers)
    every = _every(config, family, layers)
    if every is None:
        return None
    if "sliding_window" in config and config["sliding_window"] is None:
        raise ValueError(
            f"{CONFIG} has sliding_window null and layers of {LOCAL}; state the tokens of the "
            f"window, or {FULL} in every layer"
        )
    window = whole(config, "sliding_window", WINDOW)
    return LayerPattern(every=every, window=window, local_rope=_local_rope(config, family, rope))


def _unrotated(config: Mapping[str, Any], layers: int) -> LayerPattern | None:
    if config.get("use_sliding_window", False):
        raise ValueError(
            f"{CONFIG} has use_sliding_window true; the SmolLM3 trained here has no window"
        )
    if windowed := sorted(set(words(config, "layer_types")) - {FULL}):
        raise ValueError(
            f"{CONFIG} has {', '.join(windowed)} in layer_types; the SmolLM3 trained here has "
            f"{FULL} in every layer"
        )
    turns = config.get("no_rope_layers")
    if turns is None:
        every = whole(config, "no_rope_layer_interval", EVERY["smollm3"])
        if every == 1:
            raise ValueError(
                f"{CONFIG} has no_rope_layer_interval 1, so no layer would rotate; it is at least 2"
            )
        return LayerPattern(every=every, full_rotates=False) if every <= layers else None
    if not isinstance(turns, list) or any(turn not in (0, 1) for turn in turns):
        raise ValueError(
            f"{CONFIG} has no_rope_layers {turns!r}; it is a list with 1 for each layer that "
            "rotates and 0 for the others"
        )
    # transformers reads the first ones of a longer list
    period = _period([turn == 0 for turn in turns[:layers]], layers, "no_rope_layers", "0")
    return None if period is None else LayerPattern(every=period, full_rotates=False)


def _every(config: Mapping[str, Any], family: str, layers: int) -> int | None:
    kinds = words(config, "layer_types")
    if not kinds:
        every = EVERY[family]
        if family == "gemma3":  # the class of olmo3 in transformers has no such field
            every = whole(config, "sliding_window_pattern", every)
        if every > layers:
            raise ValueError(
                f"{CONFIG} has {layers} layers, and full attention in every {every}th: none would "
                "have it; state layer_types"
            )
        return None if every == 1 else every
    unknown = sorted(set(kinds) - {FULL, LOCAL})
    if unknown:
        raise ValueError(
            f"{CONFIG} has {', '.join(unknown)} in layer_types; known here are {FULL} and {LOCAL}"
        )
    return _period([kind == FULL for kind in kinds], layers, "layer_types", FULL)


def _period(full: Sequence[bool], layers: int, name: str, word: str) -> int | None:
    """Return the distance of full layers; None if all are alike without a window."""
    if len(full) != layers:
        raise ValueError(f"{CONFIG} has {len(full)} entries in {name} and {layers} layers")
    of_windows = name == "layer_types"
    if all(full) if of_windows else not any(full):
        return None
    if all(full) or not any(full):
        raise ValueError(
            f"{CONFIG} has {name} with {'no' if of_windows else 'every layer'} {word}; a model "
            f"trained here has {word} at every n-th layer, n at least 2"
        )
    every = full.index(True) + 1
    wrong = [at for at, is_full in enumerate(full, start=1) if is_full != (at % every == 0)]
    if wrong:
        raise ValueError(
            f"{CONFIG} has {name} without a period: {word} is at layer {every} first, and by that "
            f"layer {wrong[0]} would differ; a model trained here has {word} at every n-th layer, "
            "n at least 2"
        )
    return every


def _local_rope(config: Mapping[str, Any], family: str, rope: RopeScaling) -> RopeScaling:
    stated, name = config.get(LOCAL_BASE), LOCAL_BASE  # by the rule of transformers 4
    if family == "olmo3":
        stated, name = config.get("rope_theta"), "rope_theta"
    if not _by_kind(config):
        base = number(config, LOCAL_BASE, 10_000.0) if family == "gemma3" else rope.base
        return RopeScaling.base_change(int(base) if float(base).is_integer() else base)
    _require_rotation(config, LOCAL)
    found = rotations_of({**config, "layer_types": [LOCAL]} | {"rope_theta": None})[LOCAL]
    assert found is not None
    if stated is not None and number(config, name) != float(found.base):
        raise ValueError(
            f"{CONFIG} has {name} {stated!r} and in {NEW} a rope_theta of {found.base!r} for "
            f"{LOCAL}; transformers 4 computes by the first, 5 by the second: leave one of them"
        )
    return found


def layer_fields(card: ModelCard) -> dict[str, Any]:
    """Return the fields of config.json that state a card's pattern; none in other families."""
    numbers = range(1, card.layers + 1)
    if card.family not in EVERY:
        return {}
    pattern = card.pattern
    full = [pattern is None or pattern.is_full(number) for number in numbers]
    if card.family == "smollm3":
        turns = [1 if pattern is None else int(pattern.turn_of(n) != "none") for n in numbers]
        interval = card.layers + 1 if pattern is None else pattern.every
        return {"no_rope_layers": turns, "no_rope_layer_interval": interval}
    window = WINDOW if pattern is None else pattern.window
    found: dict[str, Any] = {
        "layer_types": [FULL if one else LOCAL for one in full],
        "sliding_window": window,
    }
    if card.family == "gemma3" and pattern is not None and pattern.local_rope is not None:
        found["sliding_window_pattern"] = pattern.every
        found[LOCAL_BASE] = float(pattern.local_rope.base)
    return found


def local_rope_fields(card: ModelCard, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` by kind of layer, the form that transformers 5 has for a family.

    Nothing for families with one rotation.
    `fields` are those of full layers (`rope_fields`). Raises ValueError for a rotation that one of
    the versions of transformers would not compute in local layers.
    """
    if not card.facts.windowed:
        return {}
    own = None if card.pattern is None else card.pattern.local_rope
    if own is None:
        return {NEW: {FULL: fields[NEW]}}
    if own.method != "default":
        raise ValueError(
            f"local layers rotate by {own.method}, and transformers 4 rotates them by a base alone"
        )
    if card.family == "olmo3" and float(own.base) != fields["rope_theta"]:
        raise ValueError(
            f"the base of full layers is {fields['rope_theta']:,.0f} and that of local layers "
            f"{own.base:,.0f}; transformers 4 has one base for all layers of {card.family}, so the "
            "export would compute another model: extend it by yarn at the model's own base"
        )
    return {
        NEW: {FULL: fields[NEW], LOCAL: {"rope_type": "default", "rope_theta": float(own.base)}}
    }
