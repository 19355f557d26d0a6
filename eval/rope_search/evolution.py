# SPDX-License-Identifier: Apache-2.0
"""Evolutionary search of LongRoPE's divisors from the critical pair on (arXiv 2502.20082).

A head turns in pairs of dimensions, pair i by f_i radians per position, so it needs 2 pi / f_i
tokens for a turn. A model trained on L0 tokens has seen no whole turn of the pairs that need more,
and stretched to S * L0 tokens these meet new angles unless divided by S at least:

    f'_i = f_i / d_i        d_i in [S, 2S], not falling          for i >= k, searched
                            d_i = d_k ** (i / k)                 for i <  k, by rule

The rule is NTK-aware scaling that ends in the critical pair k: nothing for the fastest pair, all of
d_k for k. By theory k is the first pair whose turn needs L0 tokens or more. Training shows a long
turn less often than a short one, so the pair from which on a model is lost comes earlier; the
paper finds it by trying every k from the first pair of at most ten turns on.

The population starts with one flat candidate for each k, and the divisors to be beaten (YaRN's),
and is filled up by mutations. A mutation redraws entries from k on between their neighbours, so
they stay in order, and the rest follow by the rule; k is not mutated, only selected. The best half
are parents of one child each; the best of all stay. Every candidate is scored once.

The paper states population 64, 40 rounds and mutation probability 0.3. How many are parents, and
how an entry is redrawn, it does not say: those are of LongRoPE's published code (arXiv 2402.13753),
but for the order in which entries are redrawn, at random here. The paper's Algorithm 1 writes the
rule with the pair of ten turns in place of k, which would break the order; its text has k.

Ours: the start is a candidate too, and a second flat one for each k has the start's shape for its
rule, d_i = d_k ** (log start_i / log start_k). YaRN leaves the fastest pairs alone where NTK does
not, and what a model predicts from the tokens just before depends on them.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

Score = Callable[[tuple[float, ...]], float]
"""Of divisors, lower is better; not a number counts as the worst."""

GRID = 100
"""Searched divisors are whole hundredths, as in LongRoPE's code."""
TURNS_SEEN = 10
"""Pairs of more turns than these in training are never critical (arXiv 2502.20082)."""
TRIES = 20
"""Mutations until one is new, as in LongRoPE's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How long and how widely to search."""

    population: int = 64
    iterations: int = 40
    mutation: float = 0.3
    """Probability that an entry of a child is redrawn."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a search that could not begin."""
        if self.population < 2:
            raise ValueError(f"population is {self.population}; it must be at least 2")
        if self.iterations < 0:
            raise ValueError(f"iterations is {self.iterations}; it must be at least 0")
        if not 0 < self.mutation <= 1:
            raise ValueError(f"mutation is {self.mutation}; it is a probability above 0")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Divisors of all pairs, and the rule that those before the critical pair follow."""

    exponents: tuple[float, ...]
    """Of the critical pair's divisor, one for each pair before it; 0 is the first."""
    divisors: tuple[float, ...]

    @property
    def critical(self) -> int:
        """The pair from which on divisors are searched."""
        return len(self.exponents)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search ended with."""

    best: Candidate
    score: float
    start_score: float
    evaluations: int
    history: tuple[float, ...]
    """Best score of the first population and after each iteration."""


def first_pair_below(turns: float, frequencies: Sequence[float], length: int) -> int:
    """Return the first pair that makes at most `turns` turns in `length` tokens.

    `frequencies` are radians per position, falling; their number where every pair makes more.
    """
    return sum(length * each / (2 * math.pi) > turns for each in frequencies)


def critical_pairs(frequencies: Sequence[float], length: int) -> range:
    """Return the pairs that may be critical for a model trained on `length` tokens.

    From the first of at most ten turns to the first of at most one, both within 1 and the last
    pair: where all pairs have made a turn, only the last is left to be searched.
    """
    if len(frequencies) < 2:
        raise ValueError("the search takes at least 4 rotated dimensions, and there are 2")
    last = len(frequencies) - 1
    low, high = (
        min(max(first_pair_below(turns, frequencies, length), 1), last) for turns in (TURNS_SEEN, 1)
    )
    return range(low, high + 1)


def of_rule(exponents: Sequence[float], searched: Sequence[float]) -> Candidate:
    """Return the candidate with `searched` from the critical pair on, and the rule's before it."""
    before = (searched[0] ** each for each in exponents)
    return Candidate(tuple(exponents), (*before, *searched))


def ntk_rule(critical: int) -> tuple[float, ...]:
    """Return the exponents of NTK-aware scaling that ends in pair `critical`."""
    return tuple(pair / critical for pair in range(critical))


def rule_of(start: Sequence[float], critical: int) -> tuple[float, ...]:
    """Return the exponents by which `start` rises to its divisor of pair `critical`, above 1."""
    whole = math.log(start[critical])
    return tuple(math.log(each) / whole for each in start[:critical])


def mutated(parent: Candidate, factor: float, chance: float, draws: random.Random) -> Candidate:
    """Return the parent with entries redrawn, each with probability `chance`, still in order.

    Entries of the parent outside [factor, 2 * factor], as a start may have, are moved to its ends.
    """
    least, most = _ends(factor)
    searched = parent.divisors[parent.critical :]
    steps = [min(max(round(each * GRID), least), most) for each in searched]
    order = [index for index in range(len(steps)) if draws.random() < chance]
    draws.shuffle(order)
    for index in order:
        low = steps[index - 1] if index else least
        high = steps[index + 1] if index + 1 < len(steps) else most
        steps[index] = draws.randint(low, high)
    return of_rule(parent.exponents, [step / GRID for step in steps])


def search(
    score: Score,
    *,
    start: Sequence[float],
    critical: range,
    factor: float,
    settings: Settings | None = None,
    watch: Callable[[int, float], None] | None = None,
) -> Found:
    """Return the divisors of the lowest score, never one above that of `start`.

    `start` has a divisor a pair, `critical` the pairs to try. `watch` is told how many iterations
    are done and the best score so far. The same arguments give the same result. Raises ValueError
    for a factor that does not stretch, pairs that `start` has not, and a start out of order.
    """
    settings = settings or Settings()
    _require(start, critical, factor)
    draws = random.Random(settings.seed)
    scores: dict[tuple[float, ...], float] = {}
    made: set[Candidate] = set()
    history: list[float] = []

    def scored(candidate: Candidate) -> float:
        if candidate.divisors not in scores:
            value = score(candidate.divisors)
            scores[candidate.divisors] = math.inf if math.isnan(value) else value
        return scores[candidate.divisors]

    def child(parent: Candidate) -> Candidate:
        """Return a mutation that was not made yet, or the last of so many tries."""
        for _ in range(TRIES):
            new = mutated(parent, factor, settings.mutation, draws)
            if new not in made:
                break
        made.add(new)
        return new

    def best(candidates: list[Candidate]) -> list[Candidate]:
        kept = sorted(dict.fromkeys(candidates), key=scored)[: settings.population]
        history.append(scored(kept[0]))
        if watch is not None:
            watch(len(history) - 1, history[-1])
        return kept

    first = Candidate(rule_of(start, critical[-1]), tuple(start))
    rules = [rule(pair) for pair in critical for rule in (ntk_rule, partial(rule_of, start))]
    seeds = [first, *(_flat(rule, len(start), factor, draws) for rule in rules)]
    made.update(seeds)
    filling = range(settings.population - len(seeds))
    population = best([*seeds, *(child(seeds[index % len(seeds)]) for index in filling)])
    for _ in range(settings.iterations):
        parents = population[: settings.population // 2]
        population = best([*population, *map(child, parents)])
    return Found(
        best=population[0],
        score=history[-1],
        start_score=scores[first.divisors],
        evaluations=len(scores),
        history=tuple(history),
    )


def _ends(factor: float) -> tuple[int, int]:
    """Return the least and the largest searched divisor in steps of the grid."""
    return math.ceil(factor * GRID), math.floor(2 * factor * GRID)


def _flat(exponents: Sequence[float], pairs: int, factor: float, draws: random.Random) -> Candidate:
    divisor = draws.randint(*_ends(factor)) / GRID
    return of_rule(exponents, [divisor] * (pairs - len(exponents)))


def _require(start: Sequence[float], critical: range, factor: float) -> None:
    if not 1 < factor < math.inf:
        raise ValueError(f"factor is {factor}; a search stretches, so it must be above 1")
    if not critical or critical[0] < 1 or critical[-1] >= len(start):
        raise ValueError(
            f"critical pairs are {critical.start} to {critical.stop - 1} and there are "
            f"{len(start)} pairs; they must be from 1 to {len(start) - 1}"
        )
    in_order = all(before <= after for before, after in pairwise(start))
    if not in_order or start[0] < 1 or not start[critical[0]] > 1:
        raise ValueError(
            f"start is {list(start)}; divisors begin at 1 or above, do not fall, and stretch every "
            f"pair that may be critical, from {critical[0]} on"
        )
