# SPDX-License-Identifier: Apache-2.0
"""Base models of Llama 2, 3, 3.1, 3.2 and of SmolLM2, from the published config.json of each."""

from custom_modules.rope.config import RopeScaling
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K

_CONTEXT = {"2": 4 * K, "3": 8 * K, "3.1": 128 * K, "3.2": 128 * K}
_ROPE = {
    "2": RopeScaling.base_change(10_000),
    "3": RopeScaling.base_change(500_000),
    "3.1": RopeScaling.llama3(factor=8.0),
    "3.2": RopeScaling.llama3(factor=32.0),
}
_REPOSITORY = {
    "2": "meta-llama/Llama-2-{}-hf",
    "3": "meta-llama/Meta-Llama-3-{}",
    "3.1": "meta-llama/Llama-3.1-{}",
    "3.2": "meta-llama/Llama-3.2-{}",
}
_SOURCE = {
    "2": "arXiv 2307.09288",
    "3": "arXiv 2407.21783",
    "3.1": "arXiv 2407.21783",
    "3.2": "config.json of meta-llama/Llama-3.2-{}",
}


def _llama(
    version: str, size: str, *, layers: int, hidden: int, ffn: int, heads: int, kv: int
) -> ModelCard:
    digits = version.replace(".", "")
    return ModelCard(
        name=f"llama{digits}_{size.lower()}",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=kv,
        head_dim=hidden // heads,
        vocab=32_000 if version == "2" else 128_256,
        tied_embeddings=version == "3.2",
        norm_epsilon=1e-5,
        init_std=0.02,
        native_context=_CONTEXT[version],
        native_rope=_ROPE[version],
        config_class=f"nemo.collections.llm.gpt.model.llama.Llama{digits}Config{size}",
        hf_id=_REPOSITORY[version].format(size.lower() if version == "2" else size),
        source=_SOURCE[version].format(size),
    )


LLAMA2_7B = _llama("2", "7B", layers=32, hidden=4096, ffn=11008, heads=32, kv=32)
LLAMA2_13B = _llama("2", "13B", layers=40, hidden=5120, ffn=13824, heads=40, kv=40)
LLAMA2_70B = _llama("2", "70B", layers=80, hidden=8192, ffn=28672, heads=64, kv=8)

LLAMA3_8B = _llama("3", "8B", layers=32, hidden=4096, ffn=14336, heads=32, kv=8)
LLAMA3_70B = _llama("3", "70B", layers=80, hidden=8192, ffn=28672, heads=64, kv=8)

LLAMA31_8B = _llama("3.1", "8B", layers=32, hidden=4096, ffn=14336, heads=32, kv=8)
LLAMA31_70B = _llama("3.1", "70B", layers=80, hidden=8192, ffn=28672, heads=64, kv=8)
LLAMA31_405B = _llama("3.1", "405B", layers=126, hidden=16384, ffn=53248, heads=128, kv=8)

LLAMA32_1B = _llama("3.2", "1B", layers=16, hidden=2048, ffn=8192, heads=32, kv=8)
LLAMA32_3B = _llama("3.2", "3B", layers=28, hidden=3072, ffn=8192, heads=24, kv=8)


def _smollm2(
    size: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv: int,
    base: float = 100_000,
    init_std: float = 0.02,
) -> ModelCard:
    return ModelCard(
        name=f"smollm2_{size.lower().replace('.', 'p')}",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=kv,
        head_dim=hidden // heads,
        vocab=49_152,
        tied_embeddings=True,
        norm_epsilon=1e-5,
        init_std=init_std,
        native_context=8 * K,
        native_rope=RopeScaling.base_change(base),
        config_class=None,
        hf_id=f"HuggingFaceTB/SmolLM2-{size}",
        source="arXiv 2502.02737",
    )


SMOLLM2_135M = _smollm2("135M", layers=30, hidden=576, ffn=1536, heads=9, kv=3, init_std=1 / 24)
SMOLLM2_360M = _smollm2("360M", layers=32, hidden=960, ffn=2560, heads=15, kv=5)
SMOLLM2_1P7B = _smollm2("1.7B", layers=24, hidden=2048, ffn=8192, heads=32, kv=32, base=130_000)
