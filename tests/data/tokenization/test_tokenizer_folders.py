# SPDX-License-Identifier: Apache-2.0
"""Folders of published tokenizers: SentencePiece alone, and what an incomplete one lacks."""

import argparse
import io
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from data.prepare import prepare
from data.tokenization.tokenizer import TokenizerError, load

LLAMA = {"pad_id": -1}
GEMMA = {
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "bos_piece": "<bos>",
    "eos_piece": "<eos>",
}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "special"),
    [("unigram", "LlamaTokenizer", LLAMA), ("bpe", "LlamaTokenizer", LLAMA),
     ("bpe", "GemmaTokenizer", GEMMA), ("unigram", "T5Tokenizer", T5)],
)  # fmt: skip
def test_a_folder_with_tokenizer_model_alone_makes_a_store(
    tmp_path, model_type, tokenizer_class, special
):
    text = Path(argparse.__file__).read_text()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=model, vocab_size=400,
        model_type=model_type, byte_fallback=True, minloglevel=2, **special,
    )  # fmt: skip
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    name = "spiece.model" if tokenizer_class == "T5Tokenizer" else "tokenizer.model"
    (folder / name).write_bytes(model.getvalue())
    stated = {"tokenizer_class": tokenizer_class, "extra_ids": 0}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    lines = (json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    source = str(tmp_path / "a.jsonl")
    manifest = prepare(source, tmp_path / "store", tokenizer=str(folder))
    assert manifest.tokenizer.eod_id == processor.eos_id()
    of_store = AutoTokenizer.from_pretrained(str(manifest.tokenizer_path))
    ids = of_store("parse the arguments", add_special_tokens=False)["input_ids"]
    assert processor.decode(ids).strip() == "parse the arguments"


@pytest.mark.parametrize(
    ("files", "written", "lacks"),
    [
        (["tokenizer.json"], {}, "no tokenizer_config.json, which names its class and the token"),
        (["tokenizer.json", "special_tokens_map.json"], {}, "no tokenizer_config.json"),
        ([], {"vocab.txt": "a"}, "no tokenizer_config.json"),
        (["tokenizer_config.json"], {}, r"no tokenizer\.json, tokenizer\.model or vocab\.json"),
        ([], {"config.json": '{"model_type": "llama"}'}, r"no tokenizer\.json, tokenizer\.model"),
        (
            [],
            {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}', "vocab.json": "{}"},
            r"vocab\.json without merges\.txt",
        ),
    ],
)
def test_the_file_that_a_folder_lacks_is_named(tmp_path, tokenizer, files, written, lacks):
    tokenizer.save(tmp_path / "full")
    folder = tmp_path / "part"
    folder.mkdir()
    for name in files:
        shutil.copy(tmp_path / "full" / name, folder)
    for name, content in written.items():
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=rf"cannot be loaded \(it has {lacks}") as refused:
        load(str(folder))
    assert len(str(refused.value)) < 200 + len(str(folder))
