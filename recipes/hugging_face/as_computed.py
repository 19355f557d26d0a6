# SPDX-License-Identifier: Apache-2.0
"""The rotation of a config.json as transformers computes it, compared with a model's own.

Transformers' functions are called themselves, so a field that it reads otherwise, or not at all,
is seen before a folder is served. It computes in fp32.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from custom_modules.rope.in_effect import RotationInEffect
from custom_modules.rope.layers import LayerPattern
from recipes.checkpoints.rotation import RotationError
from recipes.hugging_face.layers import LOCAL_BASE, full_rope_of, pattern_of
from recipes.spec.families import FAMILIES

FP32 = 1e-5
"""Relative difference of powers and quotients in fp32 that is rounding."""


def rotation_of_folder(folder: Path, like: RotationInEffect, length: int) -> RotationInEffect:
    """Return what transformers rotates by with the config.json of a folder.

    It is computed at the lengths of `like`, or else for sequences of `length` tokens.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    theirs.set_verbosity_error()  # it warns of fields that other engines read
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    finally:
        theirs.set_verbosity(level)
    scaling = getattr(config, "rope_scaling", None) or {}
    compute = ROPE_INIT_FUNCTIONS[scaling.get("rope_type", scaling.get("type", "default"))]

    def at(tokens: int) -> tuple[tuple[float, ...], float]:
        frequencies, temperature = compute(config, torch.device("cpu"), seq_len=tokens)
        return tuple(frequencies.double().tolist()), float(temperature)

    local = None
    if like.local is not None:
        base = getattr(config, LOCAL_BASE, config.rope_theta)
        plain = copy.copy(config)
        plain.rope_theta, plain.rope_scaling = base, None
        plain.rope_parameters = None
        frequencies, of_local = ROPE_INIT_FUNCTIONS["default"](plain, torch.device("cpu"))
        local = replace(
            like.local,
            frequencies=tuple(frequencies.double().tolist()),
            temperature=float(of_local),
        )
    pattern = _pattern(config)
    short, temperature = at(like.long_above or like.length or length)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return RotationInEffect(
        frequencies=short,
        temperature=temperature,
        head_dim=int(size),
        length=like.length,
        long_frequencies=() if like.long_above is None else at(like.long_above + 1)[0],
        long_above=like.long_above,
        layers="" if pattern is None else pattern.describe(),
        local=local,
    )


def _pattern(config: Any) -> LayerPattern | None:
    """Return which layers differ by a config that transformers has read."""
    content = config.to_dict()
    family = next(
        (one for one in FAMILIES.values() if one.model_type == content.get("model_type")), None
    )
    if family is None or not family.patterned:
        return None
    return pattern_of(content, family.name, full_rope_of(content, 1.0))


def require_as_computed(folder: Path, trained: RotationInEffect, length: int) -> None:
    """Raise RotationError unless transformers rotates by a folder's config.json as trained."""
    why = rotation_of_folder(folder, trained, length).difference(trained, tolerance=FP32)
    if why:
        raise RotationError(
            f"transformers would rotate otherwise than the checkpoint was trained: {why}; the "
            "export is not written, since a server would compute another model"
        )
