# SPDX-License-Identifier: Apache-2.0
"""Find the fields of a rotation in config.json: `rope_scaling`, and `rope_parameters` in two forms.

transformers 4 has `rope_scaling`, with the base next to it. transformers 5 has `rope_parameters`,
with the base inside, and writes it either flat, for all layers, or nested by kind of layer:

    {"full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, ...},
     "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}

A kind with null has no rotation. `layer_types` states the kind of each layer; a kind that no layer
has is left out, as in transformers. A file may have both fields if they agree: version 4 computes
by `rope_scaling` alone, version 5 by `rope_scaling` first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.hugging_face.config_fields import CONFIG, mapping, words

KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that rotate heads, as transformers names them in `layer_types`."""

OLD, NEW = "rope_scaling", "rope_parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeFields:
    """Fields of one rotation."""

    name: str
    """Where they are stated, for messages."""
    content: dict[str, Any]


def rope_fields_by_kind(config: Mapping[str, Any]) -> dict[str, RopeFields | None]:
    """Return the fields of each kind of layer's rotation, None for a kind without rotation.

    Fields for all layers are returned for each kind in `layer_types`, or for full attention if the
    config states none. Raises ValueError for an unknown kind, fields both by kind and for all
    layers, a kind of `layer_types` that has no fields, and a `rope_scaling` that disagrees.
    """
    old, new = mapping(config, OLD), mapping(config, NEW)
    layers = [kind for kind in KINDS if kind in words(config, "layer_types")]
    if not any(key in KINDS or isinstance(value, Mapping) for key, value in new.items()):
        _require_agreement(old, new, NEW)
        fields = RopeFields(name=NEW if new else OLD, content=new or old)
        return dict.fromkeys(layers or KINDS[:1], fields)
    unknown = [key for key, value in new.items() if key not in KINDS]
    if unknown:
        raise ValueError(
            f"{NEW} of {CONFIG} has {', '.join(unknown)} next to fields by kind of layer; the "
            f"kinds known here are {', '.join(KINDS)}"
        )
    missing = [kind for kind in layers if kind not in new]
    if missing:
        raise ValueError(
            f"{NEW} of {CONFIG} has fields for {', '.join(new)}, and layer_types has "
            f"{', '.join(missing)} too; state them for each kind, or null for no rotation"
        )
    return {kind: _of_kind(kind, new, old) for kind in layers or new}


def _of_kind(kind: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> RopeFields | None:
    fields, name = mapping(new, kind), f"{NEW} ({kind})"
    if new[kind] is None:
        return None
    if fields.get("rope_theta") is None:
        raise ValueError(
            f"{name} of {CONFIG} has no rope_theta; state the base of each kind of layer"
        )
    if kind == KINDS[0]:  # rope_scaling is that of full attention where kinds differ
        _require_agreement(old, fields, name)
    return RopeFields(name=name, content=fields)


def _require_agreement(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> None:
    differing = [key for key in old if new and old[key] != new.get(key)]
    if differing:
        raise ValueError(
            f"{CONFIG} has {OLD} and {name}, and {differing[0]} differs; leave one of them"
        )
