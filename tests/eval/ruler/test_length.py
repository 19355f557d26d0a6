# SPDX-License-Identifier: Apache-2.0
"""The search gives a prompt the most units that fit, with few exact counts."""

import random

import pytest

from eval.ruler.length import SHARE, Prompt, ShortLengthError, fit


class Units:
    """A sample of units of drawn sizes, whose text is its number of units."""

    outputs = ("",)
    answer = ""

    def __init__(self, seed: int, *, mean: int, wrong: float, least: int = 0, most=None) -> None:
        draw = random.Random(seed)
        self.sizes = [draw.randint(0, 2 * mean) for _ in range(25_000)]
        self.mean, self.wrong, self.least, self.most = mean, wrong, least, most

    def tokens(self, units: int) -> int:
        return 30 + sum(self.sizes[:units])

    def estimate(self, units: int) -> float:
        return (30 + units * self.mean) * self.wrong

    def prompt(self, units: int) -> Prompt:
        return Prompt(str(units), "")


def fitted(drafts, budget):
    """Return what `fit` does, and how many prompts it counted."""
    counted = []

    def count(texts):
        counted.extend(texts)
        return [draft.tokens(int(text)) for draft, text in zip(waiting(texts), texts, strict=True)]

    def waiting(texts):
        return drafts if len(texts) == len(drafts) else drafts[: len(texts)]

    found, ratio = fit(drafts, budget, count)
    return found, ratio, len(counted)


@pytest.mark.parametrize("wrong", [0.05, 0.5, 1.0, 2.0, 40.0])
@pytest.mark.parametrize("mean", [1, 20, 300])
@pytest.mark.parametrize("budget", [700, 20_000])
def test_a_prompt_has_its_share_or_one_unit_more_does_not_fit(budget, mean, wrong):
    for seed in range(4):
        draft = Units(seed, mean=mean, wrong=wrong)
        [found], _, counts = fitted([draft], budget)
        assert found.tokens == draft.tokens(found.units) <= budget
        assert found.tokens >= SHARE * budget or draft.tokens(found.units + 1) > budget
        assert counts < 20


def test_a_good_estimate_needs_one_count_and_a_wrong_one_a_second():
    [_], ratio, counts = fitted([Units(0, mean=2, wrong=0.4)], 6000)
    assert counts == 2
    assert ratio == pytest.approx(2.5, rel=0.05)
    assert fitted([Units(0, mean=2, wrong=1.0)], 6000)[2] == 1


def test_a_sample_with_few_units_takes_all_of_them():
    [found], _, _ = fitted([Units(0, mean=2, wrong=1.0, most=40)], 6000)
    assert found.units == 40


def test_a_sample_whose_shortest_prompt_is_too_long_is_refused():
    draft = Units(0, mean=20, wrong=1.0, least=5)
    with pytest.raises(ShortLengthError) as refused:
        fitted([draft], 40)
    assert refused.value.tokens == draft.tokens(5)
