"""A Llama in shape, small enough to train on two CPU cores."""

from custom_modules.rope_scaling import RopeScaling
from recipes.model_card import ModelCard

TINY = ModelCard(
    name="tiny",
    layers=4,
    hidden=128,
    ffn_hidden=384,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=2048,
    tied_embeddings=True,
    norm_epsilon=1e-5,
    init_std=0.02,
    native_context=512,
    native_rope=RopeScaling.base_change(10_000),
    config_class="nemo.collections.llm.gpt.model.llama.LlamaConfig",
    hf_id=None,
    source="ours",
)
