# SPDX-License-Identifier: Apache-2.0
"""Base models of Mistral and Mixtral, from the published config.json of each.

Mistral 7B is version 0.3, whose attention has no window. The window of 4,096 in NeMo's class is
that of version 0.1, which also had a smaller vocabulary and base. Mistral NeMo was trained for
128K; revisions of its config.json state 1,024,000 and 128,000.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K

_NEMO = "nemo.collections.llm.gpt.model"


def _mistral(
    name: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    vocab: int,
    context: int,
    nemo: str,
    hf_id: str,
    source: str,
    experts: int = 0,
    said: tuple[int, ...] = (),
) -> ModelCard:
    """Return a card; `said` are the contexts in revisions of config.json."""
    return ModelCard(
        name=name,
        family="mixtral" if experts else "mistral",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocab=vocab,
        experts=experts,
        experts_per_token=2 if experts else 0,
        tied_embeddings=False,
        norm_epsilon=1e-5,
        init_std=0.02,
        native_context=context,
        config_contexts=said,
        native_rope=RopeScaling.base_change(1_000_000),
        config_class=f"{_NEMO}.{nemo}",
        hf_id=f"mistralai/{hf_id}",
        source=source,
    )


MISTRAL_7B = _mistral(
    "mistral_7b",
    layers=32,
    hidden=4096,
    ffn=14336,
    heads=32,
    vocab=32_768,
    context=32 * K,
    nemo="mistral.MistralConfig7B",
    hf_id="Mistral-7B-v0.3",
    source="config.json of mistralai/Mistral-7B-v0.3",
)
MISTRAL_NEMO_12B = _mistral(
    "mistral_nemo_12b",
    layers=40,
    hidden=5120,
    ffn=14336,
    heads=32,
    vocab=131_072,
    context=128 * K,
    said=(1_024_000, 128_000),
    nemo="mistral.MistralNeMoConfig12B",
    hf_id="Mistral-Nemo-Base-2407",
    source="https://mistral.ai/news/mistral-nemo",
)
MIXTRAL_8X7B = _mistral(
    "mixtral_8x7b",
    layers=32,
    hidden=4096,
    ffn=14336,
    heads=32,
    experts=8,
    vocab=32_000,
    context=32 * K,
    nemo="mixtral.MixtralConfig8x7B",
    hf_id="Mixtral-8x7B-v0.1",
    source="arXiv 2401.04088",
)
MIXTRAL_8X22B = _mistral(
    "mixtral_8x22b",
    layers=56,
    hidden=6144,
    ffn=16384,
    heads=48,
    experts=8,
    vocab=32_000,
    context=64 * K,
    nemo="mixtral.MixtralConfig8x22B",
    hf_id="Mixtral-8x22B-v0.1",
    source="https://mistral.ai/news/mixtral-8x22b",
)
