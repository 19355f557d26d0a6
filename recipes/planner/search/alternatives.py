# SPDX-License-Identifier: Apache-2.0
"""What to change if no layout fits: the GPUs, the batch or the length."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from recipes.planner.batch_size import even_batch, odd_part
from recipes.planner.plan import Plan
from recipes.planner.search.parallel_sizes import LARGEST_CLUSTER
from recipes.planner.search.ranking import SearchResult, fits, search
from recipes.planner.search.request import SearchRequest, of_stage
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Fp8
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Stage
from recipes.spec.units import GiB, K

MOST_DOUBLINGS = 6
"""Doublings of the requested GPUs that are tried for an alternative."""
LONGEST = 2**31
BATCH_GAIN = 0.02
"""Gain of tokens per second from which another batch is offered."""


class NoLayoutError(ValueError):
    """Raised when nothing fits; says what is lacking, how much, and what would fit."""


def best(
    card: ModelCard, stage: Stage, cluster: Cluster, *, gpus: int, fp8: Fp8 | None = None
) -> Plan:
    """Return the plan that a run of a stage takes; raise NoLayoutError if none fits."""
    question = of_stage(card, stage, cluster, gpus=gpus, fp8=fp8 or Fp8())
    return automatic(question)


def automatic(question: SearchRequest) -> Plan:
    """Return the plan that a run takes without being told; raise NoLayoutError if none fits."""
    answer = search(question)
    if answer.automatic is None:
        raise NoLayoutError(why_not(question, answer))
    return answer.automatic


def why_not(question: SearchRequest, answer: SearchResult) -> str:
    """Return what is lacking if nothing fits, how much, and the cheapest change that helps."""
    card, cluster = question.card, question.cluster
    said = (
        f"no layout of {card.name} at {question.seq_length:,} tokens fits "
        f"{question.gpus} GPU{'s' if question.gpus > 1 else ''} of "
        f"{cluster.name}"
    )
    if answer.nearest is None:
        reasons = "; ".join(answer.ruled_out) or "nothing was left to try"
        change = _even_sizes(question)
        return f"{said}: {reasons}" + (f". {change}" if change else "")
    change = _cheapest_change(question)
    if answer.refused:
        return f"{said}: {answer.refused}" + (f". {change}" if change else "")
    return f"{said}; the nearest {lacks(answer.nearest)}" + (f". {change}" if change else "")


def lacks(one: Plan) -> str:
    """Return as text what a plan that does not fit lacks."""
    short_of = []
    if one.short > 0:
        short_of.append(f"{_gib(one.short)} of GPU memory")
    if one.host_short > 0:
        short_of.append(f"{_gib(one.host_short)} of host memory a rank")
    return f"lacks {' and '.join(short_of)}"


def _gib(size: float) -> str:
    return f"{size / GiB:.{1 if size > 0.1 * GiB else 2}f} GiB"


def _even_sizes(question: SearchRequest) -> str:
    """Return as text the nearest number of GPUs, batch or length that divides and fits."""
    sequences = question.tokens_per_batch // question.seq_length
    gpus = question.gpus
    fewer = 2 ** (gpus.bit_length() - 1)
    odd = odd_part(gpus)
    tried = [
        (f"{fewer} GPUs would do", replace(question, gpus=fewer)),
        *(
            (
                f"a batch of {count:,} sequences ({count * question.seq_length:,} tokens) would do",
                replace(question, tokens_per_batch=count * question.seq_length),
            )
            for count in (sequences // odd * odd, (sequences // odd + 1) * odd)
            if count
        ),
    ]
    even = question.seq_length // K * K
    if even and even != question.seq_length:
        shorter = replace(question, seq_length=even, tokens_per_batch=sequences * even)
        tried.append((f"{even:,} tokens would do", shorter))
    return ", or ".join(words for words, other in tried if fits(other))


def _cheapest_change(question: SearchRequest) -> str:
    """Return as text the smallest change of GPUs or length that makes it fit."""
    found = []
    doubled = [question.gpus * 2**n for n in range(1, MOST_DOUBLINGS + 1)]
    doubled = [gpus for gpus in doubled if gpus <= LARGEST_CLUSTER]
    gpus = _first(doubled, lambda gpus: fits(replace(question, gpus=gpus)))
    if gpus:
        found.append(f"{gpus} GPUs would do")
    reached = max_length(question)
    if reached:
        found.append(f"these GPUs reach at least {reached:,} tokens")
    said = ", or ".join(found)
    return said[:1].upper() + said[1:]


def longest(fits_at: Callable[[int], bool]) -> int:
    """Return the longest context that fits, in eighths of a power of two; 0 if none fits.

    The boundary is found by bisection: what fits a length fits shorter ones.
    """
    powers = [2**n for n in range(K.bit_length() - 1, LONGEST.bit_length())]
    too_long = _first(powers, lambda length: not fits_at(length))
    if too_long == K:
        return 0
    if not too_long:
        return LONGEST
    eighth = too_long // 16
    between = [too_long // 2 + n * eighth for n in range(1, 8)]
    return (_first(between, lambda length: not fits_at(length)) or too_long) - eighth


def max_length(question: SearchRequest) -> int:
    """Return the longest context that fits in any layout; 0 if none fits.

    Ranks that are not a power of two divide multiples of their odd part: lengths are rounded down
    to such.
    """
    part = odd_part(question.gpus) * K

    def even(length: int) -> int:
        return length - length % part if length >= part else length

    return even(longest(lambda length: fits(question.at_length(even(length)))))


def faster_batch(question: SearchRequest, answer: SearchResult) -> Plan | None:
    """Return the plan of a batch of about the same size that more data ranks divide.

    Returns None for a layout of the user's, and unless its tokens take less time by `BATCH_GAIN`.
    """
    if answer.given:
        return None
    plan = answer.plans[0]
    even = even_batch(question.tokens_per_batch, question.seq_length, question.gpus)
    if even == question.tokens_per_batch:
        return None
    found = search(replace(question, tokens_per_batch=even), tightest=answer.tightest)
    other = next((one for one in found.plans if not one.untried or plan.untried), None)
    if other is None:
        return None
    gain = other.time.tokens_per_gpu_second / plan.time.tokens_per_gpu_second
    return other if gain > 1 + BATCH_GAIN else None


def _first(numbers: list[int], holds: Callable[[int], bool]) -> int:
    """Return by bisection the first number for which something holds, as for all after it.

    Returns 0 if it holds for none.
    """
    at = bisect_left(numbers, True, key=holds)
    return numbers[at] if at < len(numbers) else 0
