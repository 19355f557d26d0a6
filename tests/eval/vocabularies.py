# SPDX-License-Identifier: Apache-2.0
"""Small vocabularies of each kind in use, trained on the same text of prose and numbers."""

import io
import random
from collections.abc import Callable
from typing import NamedTuple

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.tokenization.tokenizer import train

TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before merges: digits in groups of up to three, without the space."""


class Vocabulary(NamedTuple):
    """A tokenizer as the evaluations use it, and its inverse."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def lines() -> list[str]:
    """Return lines of code and prose with numbers of 1 to 7 digits, many of them frequent."""
    draws = random.Random(0)
    made = []
    for _ in range(2000):
        number = str(draws.randrange(10 ** draws.randint(1, 7)))
        frequent = draws.choice(("48", "482", "13", "2024", "65536", "777"))
        made.append(
            f"SIZE = {number}\nassert SIZE == {number}\nthe code of {frequent} is {number}."
        )
        made.append(f"{frequent}{number},{number}{frequent} and PASSKEY is {frequent}\n")
    return made


def sentence_piece(vocab_size: int, **options: object) -> Vocabulary:
    """Return a SentencePiece vocabulary with bytes for what it does not have, as Llama 2's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in lines() for line in text.splitlines()),
        model_writer=model, vocab_size=vocab_size, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        num_threads=1, **options,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Vocabulary(processor.encode, processor.decode)


def byte_level() -> Vocabulary:
    """Return the byte-level BPE that `longhaul prepare` trains, with the space in the tokens."""
    trained = train(lines(), 700)
    return Vocabulary(
        lambda text: trained.encode_documents([text])[0].tolist(), trained.backend.decode
    )


def tiktoken_style() -> Vocabulary:
    """Return byte-level BPE that is split as tiktoken's vocabularies are."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TIKTOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _trained(backend)


def without_splits() -> Vocabulary:
    """Return byte-level BPE that merges across spaces and ends of lines too."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _trained(backend)


def _trained(backend: Tokenizer) -> Vocabulary:
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    backend.train_from_iterator(lines(), trainer)
    return Vocabulary(lambda text: backend.encode(text).ids, backend.decode)


KINDS = {
    "SentencePiece BPE of single digits, as Llama 2 and Mistral": lambda: sentence_piece(
        340, model_type="bpe", split_digits=True
    ),
    "SentencePiece BPE of whole numbers": lambda: sentence_piece(700, model_type="bpe"),
    "SentencePiece unigram, as Gemma's first": lambda: sentence_piece(700, model_type="unigram"),
    "byte-level BPE of longhaul prepare": byte_level,
    "tiktoken of three digits, as Llama 3": tiktoken_style,
}
