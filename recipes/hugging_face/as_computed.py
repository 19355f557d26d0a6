# SPDX-License-Identifier: Apache-2.0
"""The rotation of a config.json as transformers computes it, compared with a model's own.

Transformers' functions are called themselves, so a field that it reads otherwise, or not at all,
is seen before a folder is served. Where layers differ, a small model of the same class and number
of layers is built, and asked for the window and the rotation of each. It computes in fp32.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.in_effect import RotationInEffect
from custom_modules.rope.layers import LayerPattern
from recipes.checkpoints.rotation import RotationError

FP32 = 1e-5
"""Relative difference of powers and quotients in fp32 that is rounding."""


def head_facts(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return head size and rotated part that transformers' class has for a shape; or nothing.

    `shape` are the fields of a config.json without those of the rotation.
    """
    from transformers import CONFIG_MAPPING

    if shape["model_type"] not in CONFIG_MAPPING:
        return {}
    config = CONFIG_MAPPING[shape["model_type"]].from_dict(dict(shape))
    keys = ("head_dim", "partial_rotary_factor", "rotary_pct", "rotary_dim")
    return {key: getattr(config, key) for key in keys if hasattr(config, key)}


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

    pattern = _built_pattern(config) if like.layers else None
    short, temperature = at(like.long_above or like.length or length)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return RotationInEffect(
        frequencies=short,
        temperature=temperature,
        head_dim=int(size),
        length=like.length,
        long_frequencies=() if like.long_above is None else at(like.long_above + 1)[0],
        long_above=like.long_above,
        layers="" if pattern is None else pattern.words(),
        local=None
        if pattern is None or pattern.of_local is None or like.local is None
        else pattern.local(like.local),
    )


def _built_pattern(config: Any) -> "_Built":
    """Return how the layers of a config differ, read from a model of few weights of its class."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    small.num_attention_heads = small.num_key_value_heads = 1
    small.hidden_size = small.intermediate_size = small.vocab_size = 8
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    model = AutoModelForCausalLM.from_config(small).model
    attention = [layer.self_attn for layer in model.layers]
    windows = [getattr(one, "sliding_window", None) for one in attention]
    turns = [bool(getattr(one, "use_rope", True)) for one in attention]
    of_local = getattr(model, "rotary_emb_local", None)  # Gemma 3
    if of_local is None and hasattr(model, "rotary_embs"):  # Olmo 3
        of_local = model.rotary_embs["sliding_attention"]
    return _Built(windows, turns, of_local)


@dataclass(frozen=True, slots=True)
class _Built:
    """The layers of transformers' model."""

    windows: list[int | None]
    turns: list[bool]
    of_local: Any
    """The module that makes the tables of local layers; None if there is one for all."""

    def words(self) -> str:
        """Return how they differ, in the words of a pattern; empty if they do not."""
        windowed = any(self.windows)
        full = [window is None for window in self.windows] if windowed else [
            not turns for turns in self.turns
        ]  # fmt: skip
        if not windowed and all(self.turns):
            return ""
        every = full.index(True) + 1 if True in full else 0
        if every < 2 or any(one != (at % every == 0) for at, one in enumerate(full, start=1)):
            return "layers without a period"
        return LayerPattern(
            every=every,
            window=self.windows[0],
            local_rope=None if self.of_local is None else RopeScaling.base_change(10_000),
            full_rotates=all(self.turns),
        ).describe(base=False)

    def local(self, like: RotationInEffect) -> RotationInEffect:
        """Return the rotation of local layers."""
        return replace(
            like,
            frequencies=tuple(self.of_local.inv_freq.double().tolist()),
            temperature=float(self.of_local.attention_scaling),
        )


def require_as_computed(folder: Path, trained: RotationInEffect, length: int) -> None:
    """Raise RotationError unless transformers rotates by a folder's config.json as trained."""
    why = rotation_of_folder(folder, trained, length).difference(trained, tolerance=FP32)
    if why:
        raise RotationError(
            f"transformers would rotate otherwise than the checkpoint was trained: {why}; the "
            "export is not written, since a server would compute another model"
        )
