# SPDX-License-Identifier: Apache-2.0
"""Base models of Qwen 2.5 and 3, from the published config.json of each.

All were trained on 32,768 tokens at most (arXiv 2412.15115, section 3.3; 2505.09388, section 3.2).
The config.json of most Qwen 2.5 models says 131,072, to which the authors extrapolate.

No base model of Qwen 3 32B was published. Its card is that of the post-trained model, whose
config.json says 40,960: 32,768 tokens for the answer plus the prompt.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K

_TRAINED = 32 * K
_ROPE = RopeScaling.base_change(1_000_000)
_NEMO = "nemo.collections.llm.gpt.model"
_NEMO_SIZES = {"0.5B": "500M", "0.6B": "600M", "1.5B": "1P5B", "1.7B": "1P7B"}


def _name(version: str, size: str) -> str:
    return f"qwen{version}_{size.lower().replace('.', 'p').replace('-', '_')}"


def _qwen25(
    size: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv: int,
    tied: bool = False,
    epsilon: float = 1e-6,
    said: int = 128 * K,
) -> ModelCard:
    """Return a card; `said` is the context in config.json."""
    return ModelCard(
        name=_name("25", size),
        family="qwen2",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=kv,
        head_dim=hidden // heads,
        vocab=151_936 if tied else 152_064,  # the smaller ones are padded less
        tied_embeddings=tied,
        norm_epsilon=epsilon,
        init_std=0.02,
        native_context=_TRAINED,
        config_contexts=() if said == _TRAINED else (said,),
        native_rope=_ROPE,
        config_class=f"{_NEMO}.qwen2.Qwen25Config{_NEMO_SIZES.get(size, size)}",
        hf_id=f"Qwen/Qwen2.5-{size}",
        source="arXiv 2412.15115",
    )


def _qwen3(
    size: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv: int = 8,
    tied: bool = False,
    experts: int = 0,
    taken: int = 0,
    base: bool = True,
) -> ModelCard:
    """Return a card; `taken` is the number of experts that a token is sent to."""
    nemo_size = _NEMO_SIZES.get(size, size).replace("-", "_")
    return ModelCard(
        name=_name("3", size),
        family="qwen3_moe" if experts else "qwen3",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        heads=heads,
        kv_heads=kv,
        head_dim=128,
        vocab=151_936,
        experts=experts,
        experts_per_token=taken,
        tied_embeddings=tied,
        norm_epsilon=1e-6,
        init_std=0.02,
        native_context=_TRAINED,
        config_contexts=() if base else (40 * K,),
        native_rope=_ROPE,
        config_class=f"{_NEMO}.qwen3.Qwen3Config{nemo_size}",
        hf_id=f"Qwen/Qwen3-{size}{'-Base' if base else ''}",
        source="arXiv 2505.09388",
    )


QWEN25_0P5B = _qwen25(
    "0.5B", layers=24, hidden=896, ffn=4864, heads=14, kv=2, tied=True, said=32 * K
)
QWEN25_1P5B = _qwen25("1.5B", layers=28, hidden=1536, ffn=8960, heads=12, kv=2, tied=True)
QWEN25_3B = _qwen25("3B", layers=36, hidden=2048, ffn=11008, heads=16, kv=2, tied=True, said=32 * K)
QWEN25_7B = _qwen25("7B", layers=28, hidden=3584, ffn=18944, heads=28, kv=4)
QWEN25_14B = _qwen25("14B", layers=48, hidden=5120, ffn=13824, heads=40, kv=8, epsilon=1e-5)
QWEN25_32B = _qwen25("32B", layers=64, hidden=5120, ffn=27648, heads=40, kv=8, epsilon=1e-5)
QWEN25_72B = _qwen25("72B", layers=80, hidden=8192, ffn=29568, heads=64, kv=8, epsilon=1e-5)

QWEN3_0P6B = _qwen3("0.6B", layers=28, hidden=1024, ffn=3072, heads=16, tied=True)
QWEN3_1P7B = _qwen3("1.7B", layers=28, hidden=2048, ffn=6144, heads=16, tied=True)
QWEN3_4B = _qwen3("4B", layers=36, hidden=2560, ffn=9728, heads=32, tied=True)
QWEN3_8B = _qwen3("8B", layers=36, hidden=4096, ffn=12288, heads=32)
QWEN3_14B = _qwen3("14B", layers=40, hidden=5120, ffn=17408, heads=40)
QWEN3_32B = _qwen3("32B", layers=64, hidden=5120, ffn=25600, heads=64, base=False)
QWEN3_30B_A3B = _qwen3(
    "30B-A3B", layers=48, hidden=2048, ffn=768, heads=32, kv=4, experts=128, taken=8
)
