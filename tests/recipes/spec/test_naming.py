# SPDX-License-Identifier: Apache-2.0
import pytest

from recipes.spec.naming import budget_from, budget_word, length_from, length_shown, length_word
from recipes.spec.units import K, M

LENGTHS = [(512, "512"), (1536, "1,536"), (38_400, "38,400"), (64 * K, "64K"), (4 * M, "4M")]


@pytest.mark.parametrize(("tokens", "shown"), LENGTHS)
def test_a_length_is_shown_and_read_back(tokens, shown):
    assert length_shown(tokens) == shown
    assert length_from(shown) == length_from(length_word(tokens)) == tokens


@pytest.mark.parametrize(
    "word",
    [
        "64X",
        "K",
        "",
        "-4K",
        "1.5M",
        "64 000",
        "6,5536",
        "64KB",
        "1e6",
        "0x10",
        "4\u212a",
        "\u0664K",
    ],
)
def test_what_is_no_length_is_told_how_one_is_written(word):
    with pytest.raises(ValueError, match=f"as 64K; not {word}$"):
        length_from(word)


def test_a_length_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one token; not 0K"):
        length_from("0K")


@pytest.mark.parametrize(
    ("word", "tokens"),
    [
        ("400M", 400_000_000),
        ("5B", 5 * 10**9),
        ("0.5T", 5 * 10**11),
        ("2.1b", 2_100_000_000),
        ("1,000,000", 1_000_000),
        ("512", 512),
    ],
)
def test_a_budget_is_in_powers_of_ten(word, tokens):
    assert budget_from(word) == tokens


@pytest.mark.parametrize("word", ["1G", "", "-5B", "1.5", "B", "1e9", "nan", "1,00B"])
def test_what_is_no_budget_is_told_how_one_is_written(word):
    with pytest.raises(ValueError, match=r"as 1B, 0\.5T, 400M or 1,000,000; not"):
        budget_from(word)


@pytest.mark.parametrize(
    ("tokens", "word"),
    [(10**9, "1B"), (1_500_000_000, "1500M"), (369_001, "369001"), (5 * 10**12, "5T"), (7, "7")],
)
def test_a_budget_is_written_as_it_is_read(tokens, word):
    assert budget_word(tokens) == word
    assert budget_from(word) == tokens
