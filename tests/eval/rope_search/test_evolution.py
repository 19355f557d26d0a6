# SPDX-License-Identifier: Apache-2.0
"""The search stays within the paper's bounds and finds what was hidden for it."""

import math
from itertools import pairwise

import pytest

from eval.rope_search.evolution import (
    Candidate,
    Settings,
    critical_pairs,
    first_pair_below,
    ntk_rule,
    of_rule,
    rule_of,
    search,
)

PAIRS, BASE, TRAINED, FACTOR = 16, 10_000, 512, 4.0
FREQUENCIES = [BASE ** (-pair / PAIRS) for pair in range(PAIRS)]
CRITICAL = range(4, 9)
YARN = (1, 1, 1.12, 1.27, 1.47, 1.75, 2.15, 2.8, *[4.0] * 8)
HIDDEN = of_rule(ntk_rule(6), [4.3, 4.4, 4.6, 4.9, 5.3, 5.4, 5.9, 6.3, 7.0, 7.4])


def distance(divisors: tuple[float, ...]) -> float:
    """Return how far divisors are from the hidden ones, as a sum of squared log ratios."""
    pairs = zip(divisors, HIDDEN.divisors, strict=True)
    return sum(math.log(each / hidden) ** 2 for each, hidden in pairs)


def run(score=distance, start=YARN, critical=CRITICAL, factor=FACTOR, **settings):
    """Search with the small sizes of these tests."""
    settings = {"population": 24, "iterations": 20} | settings
    return search(
        score, start=start, critical=critical, factor=factor, settings=Settings(**settings)
    )


@pytest.mark.parametrize(
    ("rotated", "base", "trained", "of_one_turn", "of_ten"),
    [(96, 10_000, 2048, 31, 19), (128, 500_000, 8192, 35, 24)],
    ids=["Phi3-mini", "LLaMA3-8B"],
)
def test_the_critical_pairs_are_those_the_paper_gives(rotated, base, trained, of_one_turn, of_ten):
    frequencies = [base ** (-2 * pair / rotated) for pair in range(rotated // 2)]
    assert critical_pairs(frequencies, trained) == range(of_ten, of_one_turn + 1)
    for turns, pair in ((1, of_one_turn), (10, of_ten)):
        formula = rotated / 2 * math.log(trained / (2 * math.pi * turns)) / math.log(base)
        assert first_pair_below(turns, frequencies, trained) == pair == math.ceil(formula)


def test_where_every_pair_has_turned_only_the_last_is_searched():
    assert critical_pairs(FREQUENCIES, 2**20) == range(15, 16)
    found = run(critical=range(15, 16), start=(*[1.0] * 15, 4.0))
    assert found.best.critical == 15


def test_the_fastest_pair_is_never_critical():
    assert critical_pairs(FREQUENCIES, 16) == range(1, 3)


def test_pairs_before_the_critical_one_turn_as_at_the_base_that_the_paper_gives():
    critical, divisor = 6, 5.5
    found = of_rule(ntk_rule(critical), [divisor] * (PAIRS - critical))
    base = BASE * divisor ** (PAIRS / critical)
    for pair in range(critical):
        assert FREQUENCIES[pair] / found.divisors[pair] == pytest.approx(base ** (-pair / PAIRS))
    assert base ** (-critical / PAIRS) == pytest.approx(FREQUENCIES[critical] / divisor)


def test_the_rule_of_the_start_gives_the_start_back():
    found = of_rule(rule_of(YARN, 8), YARN[8:])
    assert found.divisors == pytest.approx(YARN)


def test_every_candidate_is_in_order_within_the_bounds_and_scored_once():
    seen = []

    def score(divisors):
        seen.append(divisors)
        return distance(divisors)

    found = run(score)
    assert len(seen) == len(set(seen)) == found.evaluations
    assert YARN in seen
    assert len(seen) > 24 + 20 * 8
    for divisors in set(seen) - {YARN}:
        assert len(divisors) == PAIRS
        assert divisors[0] == 1
        assert all(before <= after + 1e-12 for before, after in pairwise(divisors))
        assert all(FACTOR <= each <= 2 * FACTOR for each in divisors[8:])
    criticals = {
        next(pair for pair, each in enumerate(divisors) if each >= FACTOR)
        for divisors in set(seen) - {YARN}
    }
    assert criticals == set(CRITICAL)


def test_it_finds_the_hidden_critical_pair_and_comes_near_its_divisors():
    found = run(population=64, iterations=40)
    assert found.best.critical == 6
    assert found.score == distance(found.best.divisors) < 0.02 * found.start_score
    assert found.start_score == distance(YARN)


def test_a_search_on_is_better_than_as_many_candidates_of_the_first_population():
    searched = run(population=16, iterations=20)
    drawn = run(population=searched.evaluations, iterations=0)
    assert drawn.evaluations >= 0.9 * searched.evaluations
    assert searched.score < 0.5 * drawn.score


def test_the_best_never_gets_worse():
    found = run()
    assert len(found.history) == 21
    assert all(before >= after for before, after in pairwise(found.history))
    assert found.history[-1] == found.score < found.history[0]


def test_a_start_that_nothing_beats_is_what_comes_out():
    found = run(lambda divisors: float(divisors != YARN))
    assert found.best.divisors == YARN
    assert (found.score, found.start_score) == (0, 0)


def test_a_score_that_is_no_number_is_the_worst():
    found = run(lambda divisors: math.nan if divisors[8] < 5 else divisors[8])
    assert found.start_score == math.inf
    assert 5 <= found.score < 5.2


def test_the_same_seed_gives_the_same_divisors_and_another_seed_others():
    assert run() == run()
    assert run().best != run(seed=1).best


def test_it_says_after_each_iteration_how_good_the_best_is():
    told = []
    found = search(
        distance, start=YARN, critical=CRITICAL, factor=FACTOR,
        settings=Settings(population=4, iterations=3), watch=lambda *news: told.append(news),
    )  # fmt: skip
    assert told == list(enumerate(found.history))
    assert len(told) == 4


def test_children_stay_beside_their_neighbours_where_the_factor_is_no_hundredth():
    found = run(factor=1.0375, start=(*[1.0] * 3, *[1.0375] * 13))
    assert isinstance(found.best, Candidate)
    assert 1.0375 <= found.best.divisors[-1] <= 2.075


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"population": 1}, "population is 1"),
        ({"iterations": -1}, "iterations is -1"),
        ({"mutation": 0.0}, "mutation is 0.0"),
        ({"factor": 1.0}, "factor is 1.0"),
        ({"critical": range(0, 9)}, "critical pairs are 0 to 8"),
        ({"critical": range(4, 17)}, "critical pairs are 4 to 16"),
        ({"start": (*[4.0] * 8, *[1.0] * 8)}, "do not fall"),
        ({"start": (*[0.5] * 8, *[4.0] * 8)}, "begin at 1"),
        ({"start": (*[1.0] * 8, *[4.0] * 8)}, "from 4 on"),
    ],
    ids=str,
)
def test_a_search_that_could_not_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        run(**wrong)
    if "critical" not in wrong:
        return
    with pytest.raises(ValueError, match="at least 4 rotated dimensions"):
        critical_pairs([1.0], 512)
