# SPDX-License-Identifier: Apache-2.0
"""Evolutionary search of LongRoPE's divisors from the critical pair on (arXiv 2502.20082).

RoPE rotates pairs of dimensions, pair i by f_i radians per position, so it needs 2 pi / f_i tokens
for a full turn. A model trained on L0 tokens has not seen a full turn of the pairs that need more.
Stretched to S * L0 tokens, these reach new angles unless divided by at least S:

    f'_i = f_i / d_i        d_i in [S, 2S], not falling          for i >= k, searched
                            d_i = d_k ** (i / k)                 for i <  k, by rule

The rule is NTK-aware scaling that ends in the critical pair k: a divisor of 1 for the fastest pair,
d_k for k. In theory k is the first pair whose turn needs L0 tokens or more. Training shows long
turns less often than short ones, so the model fails from an earlier pair on; the paper finds it by
trying every k from the first pair of at most ten turns on.

The population starts with one flat candidate for each k and the divisors to improve on (YaRN's),
and is filled up by mutations. A mutation redraws entries from k on between their neighbours, so
they stay in order, and the rest follow by the rule; k is not mutated, only selected. The best half
are parents of one child each; the best of all survive. Every candidate is scored once.

The paper states population 64, 40 rounds and mutation probability 0.3. It does not state how many
are parents and how an entry is redrawn: these follow LongRoPE's published code (arXiv 2402.13753),
except that entries are redrawn in random order here. The paper's Algorithm 1 writes the rule with
the pair of ten turns in place of k, which would violate the order; its text has k.

Ours: the start is a candidate too, and a second flat one for each k has the shape of the start as
its rule, d_i = d_k ** (log start_i / log start_k). Unlike NTK, YaRN does not change the fastest
pairs, on which predictions from nearby tokens depend.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

Score = Callable[[tuple[float, ...]], float]
"""Score of divisors; lower is better, and NaN is the worst."""

GRID = 100
"""Searched divisors are multiples of 0.01, as in LongRoPE's code."""
TURNS_SEEN = 10
"""Pairs with more turns in training are never critical (arXiv 2502.20082)."""
TRIES = 20
"""Maximum of mutations until one is new, as in LongRoPE's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Size and duration of the search."""

    population: int = 64
    iterations: int = 40
    mutation: float = 0.3
    """Probability that an entry of a child is redrawn."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        if self.population < 2:
            raise ValueError(f"population is {self.population}; it must be at least 2")
        if self.iterations < 0:
            raise ValueError(f"iterations is {self.iterations}; it must be at least 0")
        if not 0 < self.mutation <= 1:
            raise ValueError(f"mutation is {self.mutation}; it is a probability above 0")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Divisors of all pairs, and the rule of those before the critical pair."""

    exponents: tuple[float, ...]
    """Exponents of the critical pair's divisor, one for each pair before it; the first is 0."""
    divisors: tuple[float, ...]

    @property
    def critical(self) -> int:
        """The pair from which on divisors are searched."""
        return len(self.exponents)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a search."""

    best: Candidate
    score: float
    start_score: float
    evaluations: int
    history: tuple[float, ...]
    """Best scores: of the first population and after each iteration."""


def first_pair_below(turns: float, frequencies: Sequence[float], length: int) -> int:
    """Return the first pair that makes at most `turns` turns in `length` tokens.

    `frequencies` are radians per position, falling. Returns their number if every pair makes more.
    """
    return sum(length * each / (2 * math.pi) > turns for each in frequencies)


def critical_pairs(frequencies: Sequence[float], length: int) -> range:
    """Return the pairs that may be critical for a model trained on `length` tokens.

    From the first of at most ten turns to the first of at most one, both between 1 and the last
    pair: if all pairs have made a turn, only the last is searched.
    """
    if len(frequencies) < 2:
        raise ValueError("the search takes at least 4 rotated dimensions, and there are 2")
    last = len(frequencies) - 1
    low, high = (
        min(max(first_pair_below(turns, frequencies, length), 1), last) for turns in (TURNS_SEEN, 1)
    )
    return range(low, high + 1)


def of_rule(exponents: Sequence[float], searched: Sequence[float]) -> Candidate:
    """Return the candidate with `searched` from the critical pair on, and the rule before it."""
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

    Entries outside [factor, 2 * factor], which a start may have, are clamped.
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
    """Return the divisors with the lowest score, never above that of `start`.

    `start` has one divisor per pair, `critical` the pairs to try. `watch` receives the number of
    iterations done and the best score so far. The same arguments give the same result. Raises
    ValueError for a factor that does not stretch, pairs not in `start`, and a start out of order.
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
        """Return a new mutation, or the last one after the maximum of tries."""
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
    """Return the smallest and the largest searched divisor in steps of the grid."""
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
