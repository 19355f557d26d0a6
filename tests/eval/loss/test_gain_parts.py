# SPDX-License-Identifier: Apache-2.0
"""Kinds of tokens, and the gain from context of each kind and source with its error."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from eval.loss.context_gain import gain_of
from eval.loss.gain_parts import copied, frequent_and_rare, gain_parts, part_of, ratio_error
from eval.measurements import ContextGain
from eval.run_folder import evaluation_path, read_evaluation, write_json
from eval.uncertainty import standard_error
from tests.eval.report.test_page import built, cells, make_run, words


def copied_by_hand(window: list[int], scored: int, shortest: int) -> list[bool]:
    start = len(window) - shortest
    found = []
    for target in range(len(window) - scored, len(window)):
        gram = window[target - 2 : target + 1]
        begins = [at for at in range(target - 2) if window[at : at + 3] == gram]
        found.append(any(at < start for at in begins) and not any(at >= start for at in begins))
    return found


@pytest.mark.parametrize("vocabulary", [3, 5, 9])
def test_copied_tokens_are_those_of_a_search_by_hand(vocabulary):
    draws = np.random.default_rng(vocabulary)
    seen = set()
    for length, scored, shortest in ((640, 32, 64), (300, 64, 128), (40, 8, 39)):
        window = draws.integers(0, vocabulary, length)
        expected = copied_by_hand(window.tolist(), scored, shortest)
        assert copied(window, scored, shortest).tolist() == expected
        seen |= set(expected)
    assert seen == {True, False}


def test_copied_tokens_of_the_largest_ids_and_of_a_single_context():
    largest = 2**20
    window = np.array([largest, largest - 1, largest, 5, 6, 7, 8, largest, largest - 1, largest])
    assert copied(window, 2, 5).tolist() == [False, True]
    assert copied(window, 2, 10).tolist() == [False, False]


def test_frequent_tokens_are_half_of_the_text_and_rare_ones_at_most_a_tenth():
    draws = np.random.default_rng(1)
    text = (draws.zipf(1.3, 5000) - 1) % 300
    counts = np.bincount(text, minlength=400)
    by_count = Counter(text.tolist()).most_common()
    total, frequent = 0, set()
    for token, count in by_count:
        if total < len(text) / 2:
            frequent.add(token)
        total += count
    is_frequent, is_rare = frequent_and_rare(counts)
    assert counts[is_frequent].sum() == sum(counts[token] for token in frequent)
    assert is_frequent.sum() == len(frequent)
    assert is_rare[300:].all()
    assert 0.09 < counts[is_rare].sum() / len(text) <= 0.1
    assert counts[is_rare].max() <= counts[~is_rare].min()
    assert not (is_frequent & is_rare).any()
    assert not np.any(frequent_and_rare(np.zeros(5, np.int64)))


def test_the_error_of_a_part_is_that_of_a_mean_for_equal_counts_and_that_of_a_ratio_else():
    draws = np.random.default_rng(2)
    losses = draws.normal(3, 1, (6, 2, 40)) + draws.normal(0, 0.5, (6, 1, 1))
    whole = part_of("source", "all", losses, np.ones((6, 40), bool))
    means = losses.mean(2)
    assert whole.loss == pytest.approx(means.mean(0))
    assert whole.standard_error == pytest.approx([standard_error(means[:, at]) for at in (0, 1)])
    assert whole.gain == pytest.approx(means[:, 0].mean() - means[:, 1].mean())
    assert whole.gain_error == pytest.approx(standard_error(means[:, 0] - means[:, 1]))
    counts = np.array([1, 9, 0, 30])
    sums = np.array([2.0, 30.0, 0.0, 80.0])
    ratio = 112 / 40
    residuals = [2 - ratio, 30 - 9 * ratio, 80 - 30 * ratio]
    expected = math.sqrt(3 / 2 * sum(each**2 for each in residuals)) / 40
    assert ratio_error(sums, counts) == pytest.approx(expected)
    assert math.isnan(ratio_error(sums[:1], counts[:1]))


def made_gain() -> ContextGain:
    """Return the gain of four documents, two of each source, whose copied tokens gain most."""
    draws = np.random.default_rng(3)
    windows = [draws.integers(0, 9, 512) for _ in range(4)]
    from_before = np.stack([copied(window, 64, 128) for window in windows])
    losses = np.stack((np.full((4, 64), 3.0), 2.9 - from_before), axis=1)
    counts = np.array([900, 500, 50, 30, 20, 1, 1, 1, 1])
    parts = gain_parts(losses, windows, 128, ("books", "code") * 2, counts)
    return gain_of(64, [128, 512], losses.mean(2).tolist(), parts)


def test_parts_are_in_the_file_and_in_the_report_and_older_files_have_none(tmp_path):
    run, gain = make_run(tmp_path), made_gain()
    parts = {part.name: part for part in gain.parts}
    assert list(parts) == ["books", "code", "frequent", "rare", "copied"]
    assert parts["books"].tokens == parts["code"].tokens == 128
    assert parts["copied"].gain == pytest.approx(1.1)
    few = replace(parts["rare"], tokens=7, loss=(), standard_error=(), gain_error=math.nan)
    gain = replace(gain, parts=(*gain.parts[:3], few, gain.parts[4]))
    before = read_evaluation(run, "tiny_8k")
    write_json(evaluation_path(run, "tiny_8k"), replace(before, context_gain=gain))
    read = read_evaluation(run, "tiny_8k").context_gain
    assert [part.gain for part in read.parts] == pytest.approx(
        [part.gain for part in gain.parts], nan_ok=True
    )
    page = built(run)
    assert "of books" in cells(page)
    assert "fewer than 50 tokens" in cells(page)
    assert "+1.100 \N{PLUS-MINUS SIGN} 0.000" in cells(page)
    content = json.loads(evaluation_path(run, "tiny_8k").read_text())
    del content["context_gain"]["parts"]  # as earlier versions wrote it
    evaluation_path(run, "tiny_8k").write_text(json.dumps(content))
    assert read_evaluation(run, "tiny_8k").context_gain.parts == ()
    assert "by kind of token" not in words(built(run))
