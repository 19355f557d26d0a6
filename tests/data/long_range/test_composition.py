# SPDX-License-Identifier: Apache-2.0
import pytest

from data.long_range.composition import LongRangeError, fitted, tolerance


def fit(long: int, short: int = 20) -> str:
    """Fit a document that has one of two lengths, whatever its filler, to 100 tokens."""

    def build(characters: int, exactly: bool) -> str:
        return "x" * (long if characters >= 50 else short)

    return fitted(build, length=100, rate=1.0, count=len, what="it")[1]


def test_the_token_that_ends_a_document_belongs_to_its_length() -> None:
    assert len(fit(99)) == 99
    with pytest.raises(LongRangeError, match="no amount of filler gives a document of 83 to 99"):
        fit(100)


def test_a_document_is_shorter_than_its_length_by_the_tolerance_at_most() -> None:
    assert tolerance(100) == 17
    assert len(fit(83)) == 83
    with pytest.raises(LongRangeError, match="no amount of filler"):
        fit(82)


def test_what_takes_more_tokens_than_estimated_fits_after_some_tries() -> None:
    for rate in (0.1, 1.0, 9.0):
        _, text = fitted(
            lambda characters, _: "x" * (7 + 3 * characters),
            length=10_000, rate=rate, count=len, what="it",
        )  # fmt: skip
        assert 10_000 - tolerance(10_000) <= len(text) <= 9_999
