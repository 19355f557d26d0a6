# SPDX-License-Identifier: Apache-2.0
"""Which token types gained most from a longer context, counted by hand."""

import shutil

import pytest
import torch
from transformers import AutoTokenizer

from data.store import Manifest, StoreError
from data.train_short.impactful_tokens import add_changes, highest
from data.train_short.samples import TrainShort
from data.train_short.sentences import SentenceSelection


def scored() -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums and counts of two windows over a vocabulary of six."""
    sums, counts = torch.zeros(2, 6, dtype=torch.float64)
    add_changes(sums, counts, torch.tensor([1, 2, 1]), torch.tensor([0.5, -1.0, 0.25]))
    add_changes(sums, counts, torch.tensor([4, 2, 0]), torch.tensor([0.125, 1.5, 0.0]))
    return sums, counts


def test_changes_add_up_by_token_type():
    sums, counts = scored()
    assert sums.tolist() == [0.0, 0.75, 0.5, 0.0, 0.125, 0.0]
    assert counts.tolist() == [1, 2, 2, 0, 1, 0]


@pytest.mark.parametrize(
    ("share", "tokens"), [(0.01, [1]), (0.25, [1]), (0.5, [1, 2]), (1.0, [1, 2, 4, 0])]
)
def test_the_share_is_of_the_types_that_occur_highest_first(share, tokens):
    assert highest(*scored(), share) == tokens


def test_no_share_and_no_token_are_refused():
    with pytest.raises(ValueError, match="share is 0; expected more than 0"):
        highest(*scored(), 0)
    with pytest.raises(ValueError, match="no token was scored"):
        highest(torch.zeros(3), torch.zeros(3), 0.5)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokens": [1], "split": "odd"}'])
def test_a_damaged_analysis_is_refused(small_store, tmp_path, content):
    store = shutil.copytree(small_store, tmp_path / "store")
    (store / "impactful_tokens.json").write_text(content)
    chosen = SentenceSelection(anchors="impactful", source_length=8)
    tokenizer = AutoTokenizer.from_pretrained(store / "tokenizer")
    with pytest.raises(StoreError, match=r"impactful_tokens\.json cannot be read"):
        TrainShort.of(
            Manifest.load(store), tokenizer, seq_length=4, seed=0, positions=None, rope_scale=None,
            selection=chosen,
        )  # fmt: skip
