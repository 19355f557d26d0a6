# SPDX-License-Identifier: Apache-2.0
"""Base models of Nemotron 3 and 4, which NVIDIA describes but whose weights are not published.

The shapes are those of NeMo's config classes, which its pretraining recipes use. Values of
Nemotron-4 15B in arXiv 2402.16819 are the same; NeMo's classes leave the vocabulary to the
tokenizer, which has 256,000 entries. A stage starts from the user's own weights.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K


def _nemotron(
    version: int, size: str, *, layers: int, kv: int, init_std: float, source: str
) -> ModelCard:
    return ModelCard(
        name=f"nemotron{version}_{size.lower()}",
        family="nemotron",
        layers=layers,
        hidden=6144,
        ffn_hidden=24576,
        heads=48,
        kv_heads=kv,
        head_dim=128,
        vocab=256_000,
        tied_embeddings=False,
        norm_epsilon=1e-5,
        init_std=init_std,
        native_context=4 * K,
        native_rope=RopeScaling(method="default", base=10_000, partial_rotary_factor=0.5),
        config_class=f"nemo.collections.llm.gpt.model.nemotron.Nemotron{version}Config{size}",
        hf_id=None,
        source=source,
    )


NEMOTRON3_22B = _nemotron(
    3, "22B", layers=40, kv=48, init_std=0.008, source="NeMo 2 (Nemotron3Config22B)"
)
NEMOTRON4_15B = _nemotron(
    4, "15B", layers=32, kv=8, init_std=0.0134, source="arXiv 2402.16819; NeMo 2"
)
