# SPDX-License-Identifier: Apache-2.0
"""An import has, bit for bit, the tensors that NeMo's own importers make.

NeMo's importers fill a model made with Transformer Engine, whose module names they use. Without it
a tree of parameters with those names and our shapes is filled by the same code. NeMo 2.7.3 has no
way for a Qwen 2 with tied embeddings: its importer asks for an LM head.
"""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from tests.recipes.hugging_face.support.models import CONFIGS, folder
from tests.recipes.hugging_face.test_parity import imported

pytestmark = pytest.mark.slow

WITHOUT = ("qwen2, tied", "smollm3", "olmo3")
"""Models that NeMo 2.7.3 does not import."""
IMPORTERS = {
    "llama": "llama.HFLlamaImporter",
    "qwen2": "qwen2.HFQwen2Importer",
    "qwen3": "qwen3.HFQwen3Importer",
    "mistral": "mistral.HFMistralImporter",
    "mixtral": "mixtral.HFMixtralImporter",
    "qwen3_moe": "qwen3.HFQwen3Importer",
    "nemotron": "nemotron.HFNemotronImporter",
    "gemma3": "gemma3.HFGemma3Importer",
}


def of_checkpoint(weights, grouped: bool) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint by the name of its parameter in Megatron's model.

    `grouped` says whether all experts of a layer are one module.
    """
    from megatron.core import dist_checkpointing

    parameters = {}
    for key, tensor in dist_checkpointing.load_plain_tensors(str(weights)).items():
        if key == "content_metadata":
            continue
        name = key.removeprefix("module.")
        if not name.startswith("decoder.layers."):
            parameters[name] = tensor
            continue
        for layer, of_layer in enumerate(tensor):
            at = name.replace("decoder.layers", f"decoder.layers.{layer}")
            if ".experts." not in name:
                parameters[at] = of_layer
                continue
            for expert, of_expert in enumerate(of_layer):
                place = "mlp.experts" if grouped else f"mlp.experts.local_experts.{expert}"
                of_one = at.replace("mlp.experts.experts", place)
                parameters[f"{of_one}{expert}" if grouped else of_one] = of_expert
    return parameters


class Tree(nn.Module):
    """Modules and parameters by dotted name, with a Megatron config."""

    def __init__(self, parameters: dict[str, torch.Tensor], config: object) -> None:
        super().__init__()
        self.config = config
        for name, tensor in parameters.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(last, nn.Parameter(torch.full_like(tensor, torch.nan)))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WITHOUT])
def test_an_import_has_the_tensors_of_nemos_importer(tmp_path, megatron_rank, name):
    source = folder(tmp_path / "published", name, dtype=torch.bfloat16)
    card = imported(source, tmp_path / "imported")
    ours = of_checkpoint(tmp_path / "imported" / "weights", grouped=name == "qwen3_moe")
    config = SimpleNamespace(
        num_attention_heads=card.heads,
        num_query_groups=card.kv_heads,
        hidden_size=card.hidden,
        kv_channels=card.head_dim,
    )
    target = Tree(ours, config)
    file, importer = IMPORTERS[re.match(r"\w+", name)[0]].split(".")
    module = importlib.import_module(f"nemo.collections.llm.gpt.model.{file}")
    published = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    theirs = getattr(module, importer)(str(source))
    theirs.trust_remote_code = False  # Qwen 3's asks for it
    if name == "qwen3_moe":  # its config asks for Transformer Engine
        theirs.config = SimpleNamespace(num_moe_experts=card.experts)
    theirs.convert_state(published, target)
    made = dict(target.named_parameters())
    assert made.keys() == ours.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, made[key]), key
