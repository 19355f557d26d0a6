# SPDX-License-Identifier: Apache-2.0
"""Train or load the tokenizer that turns documents into token ids.

Trained here: byte-level BPE (Sennrich et al., arXiv 1508.07909; over bytes as in GPT-2), with one
special token, `EOD`, which ends every document and serves as bos, eos and pad too. Loaded: any
Hugging Face tokenizer that has a Rust backend and an eos token.

How documents are encoded by either: `data.tokenization.encoder`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.hub import LOADED_FROM, HubError, local_folder
from data.progress import quiet_imports
from data.store import (
    TOKENIZER_FILE,
    TRAINED,
    Manifest,
    TokenizerFacts,
    tokenizer_fingerprint,
    tokenizer_named,
)
from data.tokenization.encoder import Encoder, first_ids, largest_id, plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOD = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""One token for each byte, and `EOD`."""
LARGEST_VOCABULARY = 2**20
"""Four times the largest in use; the trainer allocates some 70 bytes for each before it begins."""

VOCABULARIES = ("tokenizer.json", ".model", ".spm", ".tiktoken", "tekken.json")
"""Ends of the names of files that have a vocabulary, apart from vocab.json and vocab.txt."""
LONGEST_TRAINING_WORD = 256
"""Characters without white space after which the trainer's copy of a text gets a line break: the
trainer's time grows with the square of a word's length."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be trained, loaded or used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentTokenizer(Encoder):
    """An encoder with its name and its Hugging Face tokenizer, which is saved in a store."""

    name: str
    hugging_face: "PreTrainedTokenizerFast"

    def save(self, folder: Path) -> TokenizerFacts:
        """Write a folder for `AutoTokenizer.from_pretrained`; return what a store says of it."""
        self.hugging_face.save_pretrained(str(folder))
        return TokenizerFacts(
            name=self.name,
            fingerprint=tokenizer_fingerprint(folder),
            vocab_size=self.vocab_size,
            eod_id=self.eod_id,
            first_ids=self.first_ids,
            largest_id=largest_id(self),
        )


def require_vocab_size(vocab_size: int) -> None:
    """Raise TokenizerError for a vocabulary that cannot hold every byte, or that no trainer can."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise TokenizerError(
            f"a vocabulary of {vocab_size} is too small: {SMALLEST_VOCABULARY} is the minimum, one"
            " token for each byte and one that ends a document"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise TokenizerError(
            f"a vocabulary of {vocab_size:,} is too large: {LARGEST_VOCABULARY:,} is the maximum;"
            " the trainer allocates memory for all of it at once"
        )


def train(texts: Iterable[str], vocab_size: int) -> DocumentTokenizer:
    """Return a byte-level BPE tokenizer trained on the texts; smaller if they are too few."""
    require_vocab_size(vocab_size)
    with quiet_imports():
        from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    long_word = re.compile(rf"(\S{{{LONGEST_TRAINING_WORD}}})(?=\S)")
    backend.train_from_iterator((long_word.sub(r"\1\n", text) for text in texts), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=EOD, eos_token=EOD, pad_token=EOD,
        # Without this, it also returns token_type_ids, which generate() of a Llama refuses.
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    return _for_documents(TRAINED, wrapped)


def load(name_or_path: str) -> DocumentTokenizer:
    """Return a Hugging Face tokenizer, from a local folder or by its name on the hub.

    The folder of a store stands for the tokenizer in it.
    """
    name_or_path = tokenizer_named(name_or_path)
    try:
        folder = local_folder(name_or_path, LOADED_FROM)
    except HubError as error:
        raise TokenizerError(f"the tokenizer cannot be loaded: {error}") from error
    with quiet_imports():
        from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of several unrelated parsers
        reason = _lacking(folder) or " ".join(str(error).split())[:300]
        raise TokenizerError(f"the tokenizer {name_or_path} cannot be loaded ({reason})") from error
    if not loaded.is_fast:
        raise TokenizerError(
            f"the tokenizer {name_or_path} has no Rust backend (no tokenizer.json); convert it"
            " with transformers first"
        )
    if loaded.eos_token_id is None:
        raise TokenizerError(
            f"the tokenizer {name_or_path} has no eos token, which has to end every document;"
            " set eos_token in its tokenizer_config.json"
        )
    return _for_documents(name_or_path, loaded)


def first_token_notes(manifest: Manifest) -> Iterator[str]:
    """Yield a note if documents lack what their tokenizer puts first, as older stores have them."""
    if manifest.tokenizer.first_ids is None:
        backend = Tokenizer.from_file(str(manifest.tokenizer_path / TOKENIZER_FILE))
        if found := first_ids(backend):
            yield (
                f"note: the tokenizer of {manifest.root} puts {backend.id_to_token(found[0])} "
                "before a text, and the store, of an older version, does not say that its "
                "documents begin with it; a model that was trained with it does worse without: "
                "prepare the store again"
            )


def _lacking(folder: Path) -> str:
    """Return what to add to a folder without a file that every tokenizer has; else nothing."""
    present = {path.name for path in folder.iterdir()}
    if not any(name.endswith(VOCABULARIES) or name.startswith("vocab.") for name in present):
        return "it has no tokenizer.json, tokenizer.model or vocab.json; copy the model's"
    if "vocab.json" in present and not present & {"merges.txt", "tokenizer.json"}:
        return "it has vocab.json without merges.txt; copy the model's"
    if not present & {"tokenizer_config.json", "config.json"}:
        return (
            "it has no tokenizer_config.json, which names its class and the token that ends a "
            "document; copy the model's"
        )
    return ""


def _for_documents(name: str, hugging_face: "PreTrainedTokenizerFast") -> DocumentTokenizer:
    backend = plain(Tokenizer.from_str(hugging_face.backend_tokenizer.to_str()))
    largest = max(backend.get_vocab(with_added_tokens=True).values())
    return DocumentTokenizer(
        name=name,
        hugging_face=hugging_face,
        backend=backend,
        eod_id=int(hugging_face.eos_token_id),
        vocab_size=largest + 1,
        first_ids=first_ids(backend),
    )
