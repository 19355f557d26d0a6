# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers whose chat templates write turns as those of published families do."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)


def turns(before: str, role: str, after: str, reply: str) -> str:
    """Return a template of turns: `before`, the role, a text after it, the content and its end."""
    return (
        f"{{% for message in messages %}}{before}{{{{ {role} }}}}{after}"
        "{{ message.content | trim }}{{ END }}\n{% endfor %}"
        f"{{% if add_generation_prompt %}}{reply}{{% endif %}}"
    )


GEMMA = (
    "<bos>"
    + REFUSES_SYSTEM
    + turns(
        "<start_of_turn>", "'model' if message.role == 'assistant' else message.role", "\n",
        "<start_of_turn>model\n",
    )
)  # fmt: skip
FAMILIES = {
    "gemma": (GEMMA, "<eos>", "<end_of_turn>", ["<bos>", "<start_of_turn>"]),
    "phi3": (
        turns("<|", "message.role", "|>\n", "<|assistant|>\n"),
        "<|endoftext|>", "<|end|>", ["<|user|>", "<|assistant|>", "<|system|>"],
    ),
    "chatml": (
        turns("<|im_start|>", "message.role", "\n", "<|im_start|>assistant\n"),
        "<|endoftext|>", "<|im_end|>", ["<|im_start|>"],
    ),
    "llama2": (
        "{% for message in messages %}{% if message.role == 'user' %}"
        "<s>[INST] {{ message.content }} [/INST]{% else %} {{ message.content }} </s>{% endif %}"
        "{% endfor %}",
        "</s>", "</s>", ["<s>"],
    ),
}  # fmt: skip
"""Template, end of sequence, end of a turn, and other special tokens."""


def tokenizer(family: str):
    """Return a tokenizer of bytes with the special tokens and the template of a family."""
    from transformers import PreTrainedTokenizerFast

    template, eos, end, special = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=eos)
    made.add_special_tokens({"additional_special_tokens": sorted({end, *special} - {eos})})
    made.chat_template = template.replace("{{ END }}", end)
    return made


def saved(family: str, folder: Path) -> Path:
    """Write the tokenizer of a family to a folder, and return the folder."""
    tokenizer(family).save_pretrained(folder)
    return folder
