# SPDX-License-Identifier: Apache-2.0
"""Model families that the recipes train, and how each differs from Llama.

All are decoders with grouped-query attention, rotary positions and, unless stated, no bias in
linear layers. Facts from the config classes of transformers 4.57 and NeMo 2.7; tests compare them.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture and its names in other libraries."""

    name: str
    architecture: str
    """Class in transformers: an entry of `architectures` in config.json."""
    model_type: str
    """As in config.json."""
    nemo_config: str
    """Dotted name of NeMo's config class, the base of ours."""
    config_class: str
    """Dotted name of our config class."""
    activation: Literal["silu", "relu2", "gelu_pytorch_tanh"] = "silu"
    """Name in transformers; relu2 is the square of a ReLU, the last GELU by its tanh formula."""
    gated: bool = True
    """Whether the MLP has a gate projection."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    zero_centered: bool = False
    """Whether norms scale by 1 + weight."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised before rotation: each head, unless `wide_qk_norm`."""
    wide_qk_norm: bool = False
    """Whether that norm is over all heads of a token at once."""
    pre_norm: bool = True
    """Whether attention and MLP have a norm before them."""
    post_norm: bool = False
    """Whether they have one after them, before the residual is added."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of their width."""
    patterned: bool = False
    """Whether some layers may differ (`custom_modules.rope.layers.LayerPattern`)."""
    windowed: bool = False
    """Whether those have a window and a rotation of their own; else some do not rotate."""
    experts: bool = False
    """Whether MLPs are experts, some of which a router selects for each token.

    All MLPs are then experts; the selected probabilities add up to 1; there is no shared expert.
    """


_NEMO = "nemo.collections.llm.gpt.model"
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="llama",
            architecture="LlamaForCausalLM",
            model_type="llama",
            nemo_config=f"{_NEMO}.llama.LlamaConfig",
            config_class="recipes.nemo2.model.LongContextLlamaConfig",
        ),
        Family(
            name="qwen2",
            architecture="Qwen2ForCausalLM",
            model_type="qwen2",
            nemo_config=f"{_NEMO}.qwen2.Qwen2Config",
            config_class="recipes.nemo2.model.LongContextQwen2Config",
            qkv_bias=True,
        ),
        Family(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            nemo_config=f"{_NEMO}.qwen3.Qwen3Config",
            config_class="recipes.nemo2.model.LongContextQwen3Config",
            qk_norm=True,
        ),
        Family(
            name="mistral",
            architecture="MistralForCausalLM",
            model_type="mistral",
            nemo_config=f"{_NEMO}.mistral.MistralConfig7B",
            config_class="recipes.nemo2.model.LongContextMistralConfig",
        ),
        Family(
            name="mixtral",
            architecture="MixtralForCausalLM",
            model_type="mixtral",
            nemo_config=f"{_NEMO}.mixtral.MixtralConfig",
            config_class="recipes.nemo2.model.LongContextMixtralConfig",
            experts=True,
        ),
        Family(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            nemo_config=f"{_NEMO}.qwen3.Qwen3MoEConfig",
            config_class="recipes.nemo2.model.LongContextQwen3MoeConfig",
            qk_norm=True,
            experts=True,
        ),
        Family(
            name="nemotron",
            architecture="NemotronForCausalLM",
            model_type="nemotron",
            nemo_config=f"{_NEMO}.nemotron.NemotronConfig",
            config_class="recipes.nemo2.model.LongContextNemotronConfig",
            activation="relu2",
            gated=False,
            normalization="LayerNorm",
            zero_centered=True,
        ),
        Family(
            name="smollm3",
            architecture="SmolLM3ForCausalLM",
            model_type="smollm3",
            nemo_config=f"{_NEMO}.llama.LlamaConfig",
            config_class="recipes.nemo2.model.LongContextSmolLM3Config",
            patterned=True,
        ),
        Family(
            name="olmo3",
            architecture="Olmo3ForCausalLM",
            model_type="olmo3",
            nemo_config=f"{_NEMO}.llama.LlamaConfig",
            config_class="recipes.nemo2.model.LongContextOlmo3Config",
            qk_norm=True,
            wide_qk_norm=True,
            pre_norm=False,
            post_norm=True,
            patterned=True,
            windowed=True,
        ),
        Family(
            name="gemma3",
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            nemo_config=f"{_NEMO}.llama.LlamaConfig",
            config_class="recipes.nemo2.model.LongContextGemma3Config",
            activation="gelu_pytorch_tanh",
            zero_centered=True,
            qk_norm=True,
            post_norm=True,
            scaled_embedding=True,
            patterned=True,
            windowed=True,
        ),
    )
}
