# SPDX-License-Identifier: Apache-2.0
"""Changes to a training sample that make it train a longer context than it has.

The random numbers of a sample depend on (seed, its number) alone: they are the same after a resume,
under any layout, and on all ranks that share the sample.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from data.store import Manifest
from data.train_short.impactful_tokens import ImpactfulTokens
from data.train_short.sentences import (
    SentenceSelection,
    chosen_tokens,
    ends_sentence,
    has_digit,
    sentence_starts,
    token_texts,
)

PositionsOf = Callable[[Tensor, Generator], Tensor]
"""Positions int64 [S] from tokens [S] and a generator; if the first parameter is named
`sentence_starts`, it receives the sentence starts, bool [S], in place of the tokens."""
ScaleOf = Callable[[Tensor, Generator], float]
"""The rotation's scale for a sample, from its tokens [S] and a generator."""


def reads_sentences(draw: PositionsOf) -> bool:
    """Return whether positions are drawn from the sentence starts."""
    return "sentence_starts" in inspect.signature(draw).parameters


def sample_generator(seed: int, sample_id: int) -> Generator:
    """Return the generator of one sample of a run."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainShort:
    """Sentences chosen from a longer text, skipped positions, a scaled rotation: those given.

    `ends` and `anchors`, bool [V], are the tokens that end a sentence and those that keep one; None
    if not needed.
    """

    seq_length: int
    seed: int
    ends: Tensor | None = None
    anchors: Tensor | None = None
    positions: PositionsOf | None = None
    rope_scale: ScaleOf | None = None
    selection: SentenceSelection | None = None

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        tokenizer: object,
        *,
        seq_length: int,
        seed: int,
        positions: PositionsOf | None,
        rope_scale: ScaleOf | None,
        selection: SentenceSelection | None,
    ) -> "TrainShort":
        """Read the parts needed of the store and its Hugging Face tokenizer.

        The vocabulary is decoded only if sentences are needed.
        """
        ends = anchors = None
        if selection is not None or (positions is not None and reads_sentences(positions)):
            texts = token_texts(tokenizer)
            ends = ends_sentence(texts, manifest.tokenizer.eod_id)
            if selection is not None:
                anchors = _anchors(selection, texts, manifest)
        return cls(
            seq_length=seq_length,
            seed=seed,
            ends=ends,
            anchors=anchors,
            positions=positions,
            rope_scale=rope_scale,
            selection=selection,
        )

    def __call__(self, sample: dict[str, Tensor], sample_id: int) -> dict[str, Tensor]:
        """Return the sample to train on; adds `rope_scale`, float64 [], if it is drawn."""
        generator = sample_generator(self.seed, sample_id)
        sample = dict(sample)
        read = sample["tokens"]
        if self.selection is not None:
            read = self._choose(sample, self.selection, generator)
        elif self.ends is not None:
            read = sentence_starts(read, self.ends)
        if self.positions is not None:
            sample["position_ids"] = self.positions(read, generator)
        if self.rope_scale is not None:
            scale = self.rope_scale(sample["tokens"], generator)
            sample["rope_scale"] = torch.tensor(scale, dtype=torch.float64)
        return sample

    def _choose(
        self, sample: dict[str, Tensor], selection: SentenceSelection, generator: Generator
    ) -> Tensor:
        """Reduce the sample to the chosen sentences; return where they start."""
        assert self.ends is not None
        assert self.anchors is not None
        text = torch.cat([sample["tokens"], sample["labels"][-1:]])
        counted = torch.cat([torch.ones(1), sample["loss_mask"]])  # of each token as a label
        starts = sentence_starts(text, self.ends)
        chosen = chosen_tokens(
            starts,
            self.anchors[text],
            generator,
            length=self.seq_length + 1,
            keep_others=selection.keep_others,
        )
        sample["tokens"], sample["labels"] = text[chosen[:-1]], text[chosen[1:]]
        sample["loss_mask"] = counted[chosen[1:]]
        sample["position_ids"] = torch.arange(self.seq_length)
        return starts[chosen[:-1]]


def _anchors(selection: SentenceSelection, texts: list[str], manifest: Manifest) -> Tensor:
    """Return which tokens keep their sentence, bool [V]."""
    if selection.anchors == "digits":
        return has_digit(texts)
    anchors = torch.zeros(len(texts), dtype=torch.bool)
    anchors[list(ImpactfulTokens.load(manifest).tokens)] = True
    return anchors
