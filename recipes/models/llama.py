# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 and 3.2 (arXiv 2407.21783; shapes from the published config.json of each)."""

from custom_modules.rope_scaling import RopeScaling
from recipes.model_card import ModelCard
from recipes.units import K

LLAMA31_8B = ModelCard(
    name="llama31_8b",
    layers=32,
    hidden=4096,
    ffn_hidden=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
    tied_embeddings=False,
    norm_epsilon=1e-5,
    init_std=0.02,
    native_context=128 * K,
    native_rope=RopeScaling.llama3(factor=8.0),
    config_class="nemo.collections.llm.gpt.model.llama.Llama31Config8B",
    hf_id="meta-llama/Llama-3.1-8B",
    source="arXiv 2407.21783",
)

LLAMA32_1B = ModelCard(
    name="llama32_1b",
    layers=16,
    hidden=2048,
    ffn_hidden=8192,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocab=128_256,
    tied_embeddings=True,
    norm_epsilon=1e-5,
    init_std=0.02,
    native_context=128 * K,
    native_rope=RopeScaling.llama3(factor=32.0),
    config_class="nemo.collections.llm.gpt.model.llama.Llama32Config1B",
    hf_id="meta-llama/Llama-3.2-1B",
    source="config.json of meta-llama/Llama-3.2-1B",
)
