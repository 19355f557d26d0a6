# SPDX-License-Identifier: Apache-2.0
"""Values of fields that a config.json leaves out, by family, as in transformers 4.57."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class HfDefaults:
    """Meaning of fields that a family's config.json leaves out, as in transformers 4.57."""

    activation: str = "hidden_act"
    """Name of the field."""
    norm_epsilon: str = "rms_norm_eps"
    """Name of the field, not a default: it must be stated."""
    init_std: float = 0.02
    kv_heads: Literal["all heads", "must be stated"] = "must be stated"
    head_dim: Literal["hidden / heads", "must be stated"] = "hidden / heads"
    tied: bool = False
    window: int | None = None
    window_switch: bool = False
    """Whether a window is used only if `use_sliding_window` is true."""
    rotated: float = 1.0
    """`partial_rotary_factor`."""
    reads_scaling: bool = True
    """Whether transformers applies `rope_scaling`; its Nemotron ignores it."""
    ffn: str = "intermediate_size"
    """Field with the width of the MLP, or of one expert."""
    experts: str = "num_local_experts"
    """Field with the number of experts."""
    only: tuple[tuple[str, Any, Any], ...] = ()
    """Fields with one supported value: name, meaning if not stated, and that value."""


HF_DEFAULTS = {
    "llama": HfDefaults(kv_heads="all heads"),
    "mistral": HfDefaults(window=4096),
    "mixtral": HfDefaults(),
    "qwen2": HfDefaults(window_switch=True),
    "qwen3": HfDefaults(head_dim="must be stated", window_switch=True),
    "qwen3_moe": HfDefaults(
        window=4096,
        window_switch=True,
        ffn="moe_intermediate_size",
        experts="num_experts",
        only=(
            ("norm_topk_prob", False, True),
            ("decoder_sparse_step", 1, 1),
            ("mlp_only_layers", [], []),
        ),
    ),
    "nemotron": HfDefaults(
        norm_epsilon="norm_eps",
        init_std=0.0134,
        kv_heads="all heads",
        rotated=0.5,
        reads_scaling=False,
    ),
    "smollm3": HfDefaults(tied=True),
    "olmo3": HfDefaults(kv_heads="all heads"),
    "gemma3": HfDefaults(
        activation="hidden_activation",
        head_dim="must be stated",
        tied=True,
        only=(
            ("attn_logit_softcapping", None, None),
            ("final_logit_softcapping", None, None),
            ("use_bidirectional_attention", False, False),
        ),
    ),
}
"""By family."""
