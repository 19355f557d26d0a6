# SPDX-License-Identifier: Apache-2.0
"""Every file that transformers reads for a tokenizer goes from a model's folder to its export."""

import ast
import fnmatch
import re
from pathlib import Path

import transformers
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import (
    ADDED_TOKENS_FILE,
    FULL_TOKENIZER_FILE,
    SPECIAL_TOKENS_MAP_FILE,
    TOKENIZER_CONFIG_FILE,
)
from transformers.utils import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE

from data.hub import TOKENIZER_FILES
from data.tokenization.tokenizer import train
from recipes.hugging_face.side_files import copy_side_files

DECLARED = re.compile(r"VOCAB_FILES_NAMES = (\{.*?\})", re.DOTALL)
BY_MISTRAL = ("tekken.json", "tokenizer.model.v3", "tokenizer.4.0.0.json")


def names_read() -> set[str]:
    """Return the names of the files that the tokenizers with a Rust backend declare."""
    folder = Path(transformers.__file__).parent / "models"
    names = {
        ADDED_TOKENS_FILE, FULL_TOKENIZER_FILE, SPECIAL_TOKENS_MAP_FILE, TOKENIZER_CONFIG_FILE,
        CHAT_TEMPLATE_FILE, f"{CHAT_TEMPLATE_DIR}/tool_use.jinja", *BY_MISTRAL,
    }  # fmt: skip
    for file in folder.glob("*/tokenization_*_fast.py"):
        for stated in DECLARED.findall(file.read_text()):
            names |= set(ast.literal_eval(stated).values())
    return names


def test_the_patterns_have_every_file_that_transformers_reads():
    names = names_read()
    assert {"spiece.model", "sentencepiece.bpe.model", "normalizer.json", "vocab.txt"} <= names
    patterns = TOKENIZER_FILES
    assert not [n for n in names if not any(fnmatch.fnmatchcase(n, each) for each in patterns)]


def test_side_files_keep_their_folders_and_what_a_tokenizer_says(tmp_path):
    source, to = tmp_path / "model", tmp_path / "export"
    train(["a few words"], 300).save(source)
    for name in (*names_read(), "model.safetensors.index.json", "adapter_config.json"):
        if not (source / name).exists():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_text("{}" if name.endswith(".json") else "a template")
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    copy_side_files(source, to)
    copied = {str(file.relative_to(to)) for file in to.rglob("*") if file.is_file()}
    assert copied == names_read()
    read = AutoTokenizer.from_pretrained(to)
    shown = read.apply_chat_template(
        [{"role": "user", "content": "hello"}],
        chat_template="tool_use",
        tools=[{"x": 1}],
        tokenize=False,
    )
    assert "x" in shown
