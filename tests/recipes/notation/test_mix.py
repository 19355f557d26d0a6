# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from data.mixture.config import Mix, OtherLength, Share
from recipes.notation import mix
from recipes.notation.ladder_file import from_text

LADDER = """
name: mine
stages:
  - seq_length: 64K
    tokens: 1B
    tokens_per_batch: 4M
    lr: {peak: 1e-5}
    documents: within
    mix:
      shares: [{source: web, weight: 3}, {source: books, weight: 1, at_least: 32K}]
      other_lengths: [{seq_length: 4K, steps: 0.08}]
      documents_per_row: 64
  - {seq_length: 8K, recovers: 64K, tokens: 1B, tokens_per_batch: 4M, lr: {peak: 1e-5}}
"""


def test_a_ladder_file_states_a_mix_and_a_recovery(tmp_path):
    first, second = from_text(LADDER, tmp_path / "mine.yaml").stages
    assert first.mix == Mix(
        shares=[
            Share(source="web", weight=3.0),
            Share(source="books", weight=1.0, at_least=32_768),
        ],
        other_lengths=[OtherLength(seq_length=4096, steps=0.08)],
        documents_per_row=64,
    )
    assert first.mix.words == (
        "75% web, 25% books from 32,768; whole documents by best fit; 8% of steps at 4,096"
    )
    assert second.mix is None
    assert (second.seq_length, second.target_length) == (8192, 65_536)


def test_words_say_how_weights_move_and_what_is_long():
    found = mix.read(
        {
            "shares": [
                {"source": "web", "weight": 1},
                {"source": "tasks", "weight": 0, "end_weight": 1},
            ],
            "long_from": "32K",
            "packing": "cut",
        }
    )
    assert found.words == (
        "100% to 50% web, 0% to 50% tasks, 50% of each from 32,768 tokens; cut end to end"
    )


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"shars": []}, "mix has no field 'shars'; did you mean shares?"),
        ({"shares": [{"place": "web", "weight": 1}]}, "no field 'place'"),
        ({"shares": {"web": 1}}, "shares is {'web': 1}; expected a list"),
        ({"long_share": 0.7}, "mix.long_share is 0.7 and no document is long without long_from"),
        ({"other_lengths": [{"seq_length": "4X", "steps": 0.1}]}, "4X"),
    ],
)
def test_a_mistake_is_named_with_its_place(stated, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        mix.read(stated)
