# SPDX-License-Identifier: Apache-2.0
"""The families of models that the recipes train: what sets each apart from a Llama; light.

All are decoders with grouped-query attention, rotary positions and no bias in linear layers but
where it is said. Facts from the config classes of transformers 4.57 and NeMo 2.7, which tests
compare with these.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture, by the names that others know it by."""

    name: str
    architecture: str
    """Class of transformers: an entry of `architectures` in config.json."""
    model_type: str
    """As in config.json."""
    nemo_config: str
    """NeMo's config class, from which ours is derived, by dotted name."""
    config_class: str
    """Ours, by dotted name."""
    activation: Literal["silu", "relu2"] = "silu"
    """In transformers' words; relu2 is the square of a ReLU."""
    gated: bool = True
    """Whether the MLP has a gate beside its first projection."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    zero_centered: bool = False
    """Whether norms scale by 1 + weight."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised, each head by itself, before they turn."""
    experts: bool = False
    """Whether MLPs are experts, of which a router picks some for each token.

    All MLPs are; the probabilities of those picked add up to 1, and none sees every token.
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
    )
}
