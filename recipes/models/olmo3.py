# SPDX-License-Identifier: Apache-2.0
"""Base models of Olmo 3 (arXiv 2512.13961): three of four layers have a window.

`olmo3_7b` and `olmo3_32b` are the published models, from the config.json of each, with YaRN on the
layers without a window. `olmo3_8k_7b` and `olmo3_8k_32b` have the weights after mid-training, which
the extension to 64K starts from; those of 32B are the average of two runs.
"""

from dataclasses import replace

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K

_PLAIN = RopeScaling.base_change(500_000)


def _olmo3(
    size: str, hf_id: str, *, layers: int, hidden: int, ffn: int, heads: int, kv: int
) -> ModelCard:
    return ModelCard(
        name=f"olmo3_{size.lower()}",
        family="olmo3",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=kv,
        head_dim=128,
        vocab=100_278,
        tied_embeddings=False,
        norm_epsilon=1e-6,
        init_std=0.02,
        native_context=64 * K,
        native_rope=RopeScaling.yarn(base=500_000, factor=8, original_length=8 * K),
        pattern=LayerPattern(every=4, window=4 * K, local_rope=_PLAIN),
        hf_id=f"allenai/{hf_id}",
        source="arXiv 2512.13961",
    )


def _before_extension(card: ModelCard, revision: str) -> ModelCard:
    return replace(
        card,
        name=card.name.replace("olmo3_", "olmo3_8k_"),
        native_context=8 * K,
        native_rope=_PLAIN,
        hf_revision=revision,
    )


OLMO3_7B = _olmo3("7B", "Olmo-3-1025-7B", layers=32, hidden=4096, ffn=11008, heads=32, kv=32)
OLMO3_32B = _olmo3("32B", "Olmo-3-1125-32B", layers=64, hidden=5120, ffn=27648, heads=40, kv=8)
OLMO3_8K_7B = _before_extension(OLMO3_7B, "stage2-step47684")
OLMO3_8K_32B = _before_extension(OLMO3_32B, "stage2-ingredient1+2-step23842")
