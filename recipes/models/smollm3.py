# SPDX-License-Identifier: Apache-2.0
"""SmolLM3 (huggingface/smollm): every fourth layer does not rotate.

`smollm3_3b` is the published base model, from its config.json. `smollm3_4k_3b` has the weights
before its context was extended, with the context and base of stage3_9T_11T.yaml.
"""

from dataclasses import replace

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K

SMOLLM3_3B = ModelCard(
    name="smollm3_3b",
    family="smollm3",
    layers=36,
    hidden=2048,
    ffn_hidden=11008,
    heads=16,
    kv_heads=4,
    head_dim=128,
    vocab=128_256,
    tied_embeddings=True,
    norm_epsilon=1e-6,
    init_std=0.02,
    native_context=64 * K,
    native_rope=RopeScaling.base_change(5_000_000),
    pattern=LayerPattern(every=4, full_rotates=False),
    hf_id="HuggingFaceTB/SmolLM3-3B-Base",
    source="https://huggingface.co/blog/smollm3",
)
SMOLLM3_4K_3B = replace(
    SMOLLM3_3B,
    name="smollm3_4k_3b",
    native_context=4 * K,
    native_rope=RopeScaling.base_change(50_000),
    hf_id="HuggingFaceTB/SmolLM3-3B-checkpoints",
    hf_revision="stage3-step-4720000",
    source="huggingface/smollm, text/pretraining/smollm3/stage3_9T_11T.yaml",
)
