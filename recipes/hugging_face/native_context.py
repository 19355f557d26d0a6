# SPDX-License-Identifier: Apache-2.0
"""The context that a model was trained for, by its config.json, and whether the file can tell.

| rotation | native context | told, if |
| --- | --- | --- |
| plain, llama3, longrope | max_position_embeddings | another length field disagrees |
| linear | the same, or that times the factor (`is_extended`) | the original length is not stated |
| dynamic | max_position_embeddings times the factor | always: most weights were trained without it |
| yarn | the original length times the factor | max_position_embeddings is another length |

An export of Longhaul states the context that its stage trained for, so nothing is told of it.
"""

from collections.abc import Mapping
from typing import Any

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config_fields import LONGEST, mapping, whole
from recipes.hugging_face.rope import ORIGINAL, OTHER_LENGTHS, RECORD, is_extended, stated_in
from recipes.hugging_face.rope_parameters import KINDS, rope_fields_by_kind


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
