# SPDX-License-Identifier: Apache-2.0
"""Intervals have the published widths, and the counts that would tell are the least that do."""

import math

import numpy as np
import pytest

from eval.loss.loss_by_position import position_bands
from eval.position_bands import Bands, band_edges
from eval.uncertainty import (
    documents_to_tell,
    interval_width,
    prompts_to_tell,
    share_interval,
    share_text,
)


@pytest.mark.parametrize(
    ("found", "tried", "interval"),
    [(0, 20, (0.0, 0.161)), (10, 20, (0.299, 0.701)), (20, 20, (0.839, 1.0)), (0, 0, (0, 1))],
)
def test_the_interval_of_a_share_is_wilsons(found, tried, interval):
    assert share_interval(found, tried) == pytest.approx(interval, abs=5e-4)


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.706), (10, 2.262), (11, 2.228), (31, 2.042), (121, 1.980)]
)
def test_a_mean_of_few_documents_has_the_interval_of_students_t(count, quantile):
    assert interval_width(count) == pytest.approx(quantile, rel=2e-3)
    assert math.isnan(interval_width(1))


@pytest.mark.parametrize(("share", "threshold"), [(0.8, 0.9), (1.0, 0.9), (0.0, 0.05)])
def test_no_fewer_prompts_would_tell_a_share_from_a_threshold(share, threshold):
    enough = prompts_to_tell(share, threshold)

    def told(tried: int) -> bool:
        low, high = share_interval(share * tried, tried)
        return not low <= threshold <= high

    assert told(enough)
    assert not told(enough - 1)
    assert prompts_to_tell(0.9, 0.9) is None


@pytest.mark.parametrize(("difference", "error", "count"), [(0.1, 0.08, 24), (-0.02, 0.5, 3)])
def test_no_fewer_documents_would_tell_a_mean_from_a_threshold(difference, error, count):
    enough = documents_to_tell(difference, error, count)

    def told(documents: int) -> bool:
        spread = error * math.sqrt(count / documents)
        return interval_width(documents) * spread <= abs(difference)

    assert told(enough)
    assert not told(enough - 1)
    assert documents_to_tell(difference, math.nan, 1) is None
    assert documents_to_tell(0.0, error, count) is None


def test_a_share_is_shown_with_its_interval():
    assert share_text(10, 20) == "50% (30%-70%)"
    assert share_text(0, 0) == "-"


def test_bands_widen_with_position_and_have_the_quarters_that_gates_compare():
    assert band_edges(1024, 64) == [0, 64, 128, 192, 256, 320, 384, 448, *range(512, 1025, 128)]
    edges = band_edges(24 * 1024, 64, [24 * 1024, 10_000])
    assert {6 * 1024, 12 * 1024, 18 * 1024, 2560, 5056, 7552} <= set(edges)
    assert len(band_edges(2**20, 64)) < 64


def test_bands_have_the_mean_of_each_document_and_the_error_over_documents():
    losses = np.random.default_rng(0).normal(3, 1, (5, 32))  # five documents, 32 buckets of 64
    bands = position_bands(losses, [2048])
    at = bands.edges.index(1024)
    assert bands.edges[at + 1] == 1280
    of_documents = losses[:, 16:20].mean(1)
    assert [row[at] for row in bands.by_document] == pytest.approx(of_documents)
    assert bands.loss[at] == pytest.approx(of_documents.mean())
    assert bands.standard_error[at] == pytest.approx(of_documents.std(ddof=1) / 5**0.5)
    assert bands.of_documents(512, 1536) == pytest.approx(losses[:, 8:24].mean(1))
    assert bands.of_documents(2048, 4096) == []


def test_bands_with_other_numbers_than_edges_are_refused():
    with pytest.raises(ValueError, match="2 bands of positions have 1 numbers"):
        Bands(edges=(0, 64, 128), loss=(1.0,), standard_error=(0.1, 0.1), by_document=())


@pytest.mark.parametrize("difference", [9e-17, 1e-300])
def test_a_mean_at_its_threshold_is_told_by_no_number_of_documents(difference):
    assert documents_to_tell(difference, 0.02, 24) is None
