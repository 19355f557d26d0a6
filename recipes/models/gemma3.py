# SPDX-License-Identifier: Apache-2.0
"""Base models of Gemma 3 (arXiv 2503.19786) that read text alone, from the config.json of each.

Five of six layers have a window and a rotation of their own. The models of 4B and more also read
images, in another architecture (`Gemma3ForConditionalGeneration`), which is not trained here.
"""

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K


def _gemma3(size: str, hf_id: str, *, layers: int, hidden: int, ffn: int) -> ModelCard:
    return ModelCard(
        name=f"gemma3_{size.lower()}",
        family="gemma3",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        heads=4,
        kv_heads=1,
        head_dim=256,
        vocab=262_144,
        tied_embeddings=True,
        norm_epsilon=1e-6,
        init_std=0.02,
        native_context=32 * K,
        native_rope=RopeScaling.base_change(1_000_000),
        pattern=LayerPattern(every=6, window=512, local_rope=RopeScaling.base_change(10_000)),
        hf_id=f"google/{hf_id}",
        source="arXiv 2503.19786",
    )


GEMMA3_270M = _gemma3("270M", "gemma-3-270m", layers=18, hidden=640, ffn=2048)
GEMMA3_1B = _gemma3("1B", "gemma-3-1b-pt", layers=26, hidden=1152, ffn=6912)
