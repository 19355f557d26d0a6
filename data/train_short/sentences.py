# SPDX-License-Identifier: Apache-2.0
"""Sentences of a token sequence, and the selection of those that make up a shorter sample.

LongRecipe (arXiv 2409.00509, sections 4.1 and 4.2): sentences without any of the token types that a
long context matters to are dropped, and the first of the rest, in the order of the text, fill the
sample. A sentence ends with a token whose whole text is one of `ENDS`, the five that the released
code lists by their ids in Llama-3's vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor

ENDS = (".", "\n", "?", "!", ".\n")

Anchors = Literal["digits", "impactful"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceSelection:
    """Rule that selects the sentences of a longer text for a sample.

    `anchors` are the tokens that keep their sentence: those with a digit (the released code's
    rule), or those of the store's analysis (`data.train_short.impactful_tokens`). Other sentences
    are kept at random.
    """

    anchors: Anchors
    source_length: int
    """Tokens of the text that sentences are chosen from."""
    keep_others: float = 0.0


def token_texts(tokenizer: Any) -> list[str]:
    """Return the text of each token of a Hugging Face tokenizer, by its id."""
    texts: list[str] = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return texts


def ends_sentence(texts: list[str], eod: int) -> Tensor:
    """Return which tokens end a sentence, bool [V]; the end of a document does."""
    ends = torch.tensor([text in ENDS for text in texts])
    ends[eod] = True
    return ends


def has_digit(texts: list[str]) -> Tensor:
    """Return which tokens have a digit in their text, bool [V]."""
    return torch.tensor([any(letter.isdigit() for letter in text) for text in texts])


def sentence_starts(tokens: Tensor, ends: Tensor) -> Tensor:
    """Return where sentences of `tokens` [S] start, bool [S]; `ends` [V] says what ends one."""
    starts = torch.ones(len(tokens), dtype=torch.bool)
    starts[1:] = ends[tokens[:-1]]
    return starts


def chosen_tokens(
    starts: Tensor, anchors: Tensor, generator: Generator, *, length: int, keep_others: float
) -> Tensor:
    """Return which tokens of a text make a sample, ascending indices int64 [length].

    `starts` and `anchors`, bool [T], mark the tokens that start a sentence and those that keep
    theirs. If the kept sentences have fewer than `length` tokens, others are added at random until
    they have enough. Raises ValueError if T is below `length`.
    """
    if len(starts) < length:
        raise ValueError(
            f"a sample of {length:,} tokens cannot be chosen from a text of {len(starts):,}"
        )
    sentence = starts.long().cumsum(0) - 1
    count = int(sentence[-1]) + 1
    kept = torch.zeros(count, dtype=torch.int64).index_add_(0, sentence, anchors.long()) > 0
    order = torch.rand(count, generator=generator)
    kept |= torch.rand(count, generator=generator) < keep_others
    sizes = torch.bincount(sentence)
    missing = length - int(sizes[kept].sum())
    if missing > 0:
        others = order.masked_fill(kept, torch.inf).argsort()[: count - int(kept.sum())]
        needed = int((sizes[others].cumsum(0) < missing).sum()) + 1
        kept[others[:needed]] = True
    return kept[sentence].nonzero().flatten()[:length]
