# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from data.prepare import prepare
from data.store import Manifest
from data.tokenization.tokenizer import DocumentTokenizer, train

WORDS = "the long context of a model is what it can look back on while it reads one more word"


def made_up_texts(count: int) -> list[str]:
    """Different documents of quite different lengths."""
    return [f"document {n}: " + f"{WORDS} {n * n}.\n" * (1 + n % 7) for n in range(count)]


def folder_of(tokenizer: DocumentTokenizer, folder: Path, template: str | None, **given) -> Path:
    """Write the tokenizer with a post-processor, as Llama 3's stands behind one of bytes."""
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    names = [word for word in (template or "").split() if word != "$A"]
    backend.add_special_tokens(names)
    if template is not None:
        known = [(name, backend.token_to_id(name)) for name in names]
        last = processors.TemplateProcessing(single=template, special_tokens=known)
        backend.post_processor = processors.Sequence([processors.ByteLevel(), last])
    given = {"eos_token": "<|endoftext|>"} | given
    PreTrainedTokenizerFast(tokenizer_object=backend, **given).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return made_up_texts(120)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> DocumentTokenizer:
    return train(texts, 400)


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Manifest:
    """Return a whole store; tests that change one copy it."""
    out = tmp_path_factory.mktemp("stores") / "store"
    return prepare(str(corpus), out, vocab_size=400, heldout_fraction=0.2)
