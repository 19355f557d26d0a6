# SPDX-License-Identifier: Apache-2.0
"""A model of Llama's architecture, small enough to train on two CPU cores.

The vocabulary is small so that words are spelled: after a few million training tokens the model
then depends on attention and shows where its context ends. The standard deviation of initial
weights is larger than the 0.02 of a large model, since it is about half of 1 / sqrt(hidden).
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.model_card import ModelCard

TINY = ModelCard(
    name="tiny",
    layers=2,
    hidden=128,
    ffn_hidden=384,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    tied_embeddings=True,
    norm_epsilon=1e-5,
    init_std=0.05,
    native_context=512,
    native_rope=RopeScaling.base_change(10_000),
    config_class="nemo.collections.llm.gpt.model.llama.LlamaConfig",
    hf_id=None,
    source="ours",
)
