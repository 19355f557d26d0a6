# SPDX-License-Identifier: Apache-2.0
import json
import random
import string
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.store import tokenizer_fingerprint
from data.tokenization.text_chunks import PIECE_CHARS, pieces
from data.tokenization.tokenizer import EOD, DocumentTokenizer, TokenizerError, load, train

LIBRARY = Path(sysconfig.get_path("stdlib"))
LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def whole(tokenizer: DocumentTokenizer, text: str) -> list[int]:
    """Tokens of a text that was never cut, by Hugging Face's own call."""
    return tokenizer.hugging_face(text, add_special_tokens=False, verbose=False)["input_ids"]


def mixed_text(seed: int, words: int) -> str:
    choose = random.Random(seed)
    parts = [
        "it's",
        "word",
        "x1",
        "12345",
        "(a, b);",
        "\u4e2d\u6587",
        "\u0440\u0443",
        "na\u00efve",
        "...",
    ]
    gaps = [" ", " ", "  ", "\n", "\n\n", "\n    ", "\t", "\r\n", "\u00a0", ""]
    return "".join(choose.choice(parts) + choose.choice(gaps) for _ in range(words))


def test_tokens_of_a_cut_text_are_those_of_the_whole(tokenizer: DocumentTokenizer) -> None:
    files = ("argparse.py", "decimal.py", "_pydecimal.py", "typing.py", "tarfile.py")
    text = "".join((LIBRARY / name).read_text(encoding="utf-8") for name in files)
    assert len(text) > 2 * PIECE_CHARS
    assert tokenizer.encode_documents([text])[0].tolist() == whole(tokenizer, text)


@pytest.mark.parametrize("limit", [257, 512, 1000])
def test_tokens_are_those_of_the_whole_wherever_pieces_end(
    tokenizer: DocumentTokenizer, limit: int
) -> None:
    for seed in range(20):
        text = mixed_text(seed, 400)
        encoded = tokenizer._encode_in_pieces([text], limit)[0]
        assert encoded.tolist() == whole(tokenizer, text), seed


def test_every_cut_that_is_not_a_hard_one_keeps_the_tokens_of_a_llama_3_tokenizer() -> None:
    texts = [mixed_text(seed, 400) for seed in range(100)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, show_progress=False))

    def tokens(text: str) -> list[int]:
        return backend.encode(text).ids

    limit, cuts = 64, 0
    for text in texts:
        between_hard_cuts = [""]
        for piece in pieces(text, lambda a, b: tokens(a + b) == tokens(a) + tokens(b), limit):
            between_hard_cuts[-1] += piece
            if len(piece) < limit:
                cuts += 1
                between_hard_cuts.append("")
        assert [token for part in between_hard_cuts for token in tokens(part)] == tokens(text)
    assert cuts > 1000


def test_text_without_spaces_is_cut_before_its_punctuation(tokenizer: DocumentTokenizer) -> None:
    choose = random.Random(3)
    marks = ["\uff0c", "\u3002", "\u3002\u201c", "\u201d"]
    words = ("".join(chr(0x4E00 + choose.randrange(500)) for _ in range(9)) for _ in range(4000))
    text = "".join(word + choose.choice(marks) for word in words)
    cut = list(pieces(text, tokenizer._same_apart, 1000))
    assert max(map(len, cut[:-1])) <= 1000
    assert all(piece[0] in "".join(marks) for piece in cut[1:])
    assert tokenizer._encode_in_pieces([text], 1000)[0].tolist() == whole(tokenizer, text)


def test_pieces_are_the_text_in_order_and_none_is_longer_than_the_limit() -> None:
    text = mixed_text(1, 2000)
    for same_apart in (lambda left, right: True, lambda left, right: False):
        cut = list(pieces(text, same_apart, 100))
        assert "".join(cut) == text
        assert max(map(len, cut)) <= 100
        assert len(cut) > 10


def test_a_line_of_five_million_characters_without_a_space_is_cut_hard(
    tokenizer: DocumentTokenizer,
) -> None:
    choose = random.Random(0)
    text = "".join(choose.choices(string.ascii_letters + string.digits, k=5_000_000))
    cut = [len(piece) for piece in pieces(text, tokenizer._same_apart)]
    assert cut[:-1] == [PIECE_CHARS] * (len(cut) - 1)
    tokens = tokenizer.encode_documents([text])[0]
    assert tokenizer.backend.decode(tokens.tolist()) == text


def test_a_huge_word_does_not_stop_training() -> None:
    choose = random.Random(0)
    word = "".join(choose.choices(string.ascii_letters, k=2_000_000))
    assert train([word, "some more text"], 400).vocab_size == 400


def test_a_document_cannot_hold_a_special_token(tokenizer: DocumentTokenizer) -> None:
    text = f"before {EOD} after{EOD}"
    tokens = tokenizer.encode_documents([text])[0]
    assert tokenizer.eod_id not in tokens
    assert tokenizer.backend.decode(tokens.tolist()) == text
    assert tokenizer.eod_id in whole(tokenizer, text)


def test_a_loaded_tokenizer_cannot_be_injected_into_and_does_not_truncate(
    tmp_path: Path, tokenizer: DocumentTokenizer
) -> None:
    tokenizer.save(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    loaded = load(str(tmp_path))
    text = f"some text of more than four tokens {EOD}"
    assert (
        loaded.encode_documents([text])[0].tolist()
        == tokenizer.encode_documents([text])[0].tolist()
    )
    assert loaded.eod_id == tokenizer.eod_id
    assert loaded.eod_id not in loaded.encode_documents([text])[0]


def test_training_twice_gives_the_same_tokenizer(tmp_path: Path, texts: list[str]) -> None:
    first = train(texts, 500).save(tmp_path / "first")
    second = train(list(reversed(texts)), 500).save(tmp_path / "second")
    other = train(texts, 501).save(tmp_path / "other")
    assert first == second
    assert first != other


def test_a_saved_tokenizer_is_read_by_transformers_and_keeps_its_fingerprint(
    tmp_path: Path, tokenizer: DocumentTokenizer
) -> None:
    fingerprint = tokenizer.save(tmp_path / "a").fingerprint
    read = AutoTokenizer.from_pretrained(str(tmp_path / "a"))
    assert read.eos_token == read.bos_token == read.pad_token == EOD
    assert len(read) == tokenizer.vocab_size
    assert set(read("text")) == {"input_ids", "attention_mask"}  # what generate() takes
    assert load(str(tmp_path / "a")).save(tmp_path / "b").fingerprint == fingerprint


def test_a_fingerprint_depends_on_the_definition_and_not_on_its_layout(
    tmp_path: Path, tokenizer: DocumentTokenizer
) -> None:
    fingerprint = tokenizer.save(tmp_path).fingerprint
    file = tmp_path / "tokenizer.json"
    definition = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(definition.items())), indent=7))
    assert tokenizer_fingerprint(tmp_path) == fingerprint
    definition["model"]["merges"].pop()
    file.write_text(json.dumps(definition))
    assert tokenizer_fingerprint(tmp_path) != fingerprint


def test_a_tokenizer_that_marks_the_start_of_a_text_is_cut_hard_and_keeps_the_text() -> None:
    backend = Tokenizer(models.WordLevel({"[?]": 0, "\u2581a": 1, "</s>": 2}, unk_token="[?]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="always", split=False)]
    )
    backend.add_special_tokens(["</s>"])

    def same_apart(left: str, right: str) -> bool:
        together, *apart = (backend.encode(text).ids for text in (left + right, left, right))
        return together == apart[0] + apart[1]

    cut = list(pieces("a a a a a a " * 20, same_apart, 50))
    assert [len(piece) for piece in cut] == [50, 50, 50, 50, 40]


def test_a_tokenizer_without_eos_and_one_that_does_not_exist_are_refused(
    tmp_path: Path, tokenizer: DocumentTokenizer
) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="has no eos token"):
        load(str(tmp_path))
    with pytest.raises(TokenizerError, match="cannot be loaded") as error:
        load(str(tmp_path / "nothing" / "there"))
    assert "\n" not in str(error.value)


def test_a_vocabulary_without_room_for_every_byte_is_refused() -> None:
    with pytest.raises(TokenizerError, match="256 is too small: 257 is the minimum"):
        train(["text"], 256)
    assert train(["text"], 257).encode_documents(["\u00e9"])[0].tolist() != []


def test_an_encoded_text_has_no_end_token_and_is_int32(tokenizer: DocumentTokenizer) -> None:
    tokens = tokenizer.encode_documents(["a model"])[0]
    assert tokens.dtype == np.int32
    assert tokens[-1] != tokenizer.eod_id
