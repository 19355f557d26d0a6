# SPDX-License-Identifier: Apache-2.0
"""The mix as it was read is what the samples of the steps hold, and near what was asked."""

import pytest

from data.mixture.as_read import read_by_source
from data.mixture.config import Mix
from data.mixture.stage_rows import StageRows
from data.packing.rows import NotPackedError
from data.store import Manifest
from tests.data.mixture.test_dataset import MIXES, ROWS, STEPS, S, dataset, stage_rows

FILL = 7
"""A token that no document has, for padding."""
LEAST_OF_BOOKS = 20_000


@pytest.mark.parametrize(
    ("done", "skipped"),
    [(9, ()), (STEPS, ((2 * ROWS, ROWS), (5 * ROWS, 2 * ROWS), (STEPS * ROWS, ROWS)))],
    ids=["nine steps", "all steps, some skipped"],
)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_tokens_by_source_are_those_of_the_samples(
    two_sources: Manifest, mix: Mix, done: int, skipped: tuple
) -> None:
    samples = dataset(two_sources, mix, eod_id=FILL)
    samples.passed_over = skipped
    counted = {"web": 0, "books": 0}
    for number in range(done * ROWS):
        tokens = samples[number]["tokens"]
        own = tokens[tokens != FILL]
        counted["books" if own.max() >= LEAST_OF_BOOKS else "web"] += own.numel()
    found = read_by_source(samples.rows, mix, done, skipped)
    assert {each.source: each.tokens for each in found} == counted
    total = sum(counted.values())
    assert total <= done * ROWS * S
    for each in found:
        assert each.share_read == pytest.approx(counted[each.source] / total)
        assert each.share_asked == pytest.approx(each.share_read, abs=0.03)
    assert sum(each.share_asked for each in found) == pytest.approx(1)


def test_weights_that_move_ask_for_their_mean(two_sources: Manifest) -> None:
    mix = MIXES["best fit"]
    rows, _ = stage_rows(two_sources, mix)
    early, late = (read_by_source(rows, mix, done)[0] for done in (6, STEPS))
    assert early.share_asked == pytest.approx(0.6)
    assert late.share_asked == pytest.approx(0.6 + (1 / 3 - 0.6) * 0.1, abs=0.01)


def test_reading_back_packs_nothing(two_sources: Manifest) -> None:
    mix = Mix(documents_per_row=3)
    wanted = {"seq_length": S, "steps": STEPS, "rows": ROWS, "seed": 3}
    with pytest.raises(NotPackedError, match="there are no packed rows at"):
        StageRows.of(two_sources, mix, **wanted, document_lengths=None)
    packed, _ = stage_rows(two_sources, mix)
    again = StageRows.of(two_sources, mix, **wanted, document_lengths=None)
    assert read_by_source(again, mix, STEPS) == read_by_source(packed, mix, STEPS)
