# SPDX-License-Identifier: Apache-2.0
"""Standard errors and 95% intervals of what an evaluation measures on a few documents or prompts.

    mean of n documents     standard error s / sqrt(n); the interval is t(n - 1) of them wide
    k of n prompts found    Wilson's interval (1927), inside of 0 to 1 also for k = 0 and k = n

A threshold outside of the interval is decided. The counts that would decide it assume that the mean
and the spread between documents stay as they are.
"""

import math
from collections.abc import Sequence
from statistics import stdev

NORMAL = 1.96
"""Standard errors on each side of a 95% interval, of many documents."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The same for the means of 2 to 10 documents: Student's t with 1 to 9 degrees of freedom."""
MOST = 1_000_000_000
"""Documents from which on a mean counts as equal to the threshold."""


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; NaN for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def interval_width(count: int) -> float:
    """Return how many standard errors a 95% interval of a mean has on each side.

    Within 0.2% of Student's t for more than 10 values; NaN for fewer than two.
    """
    if count < 2:
        return math.nan
    free = count - 1
    return STUDENT[free - 1] if free <= len(STUDENT) else NORMAL + 2.4 / free + 2.8 / free**2


def documents_to_tell(difference: float, error: float, count: int) -> int | None:
    """Return how many documents would tell a mean from a threshold `difference` away from it.

    `error` is the standard error over the `count` documents there are. None if no number is known.
    """
    if not (math.isfinite(difference) and math.isfinite(error)) or difference == 0:
        return None
    spread = error * math.sqrt(count)
    if spread > math.sqrt(MOST) / NORMAL * abs(difference):
        return None
    documents = max(2, math.ceil((NORMAL * spread / difference) ** 2))
    while interval_width(documents) * spread / math.sqrt(documents) > abs(difference):
        documents += 1
    return documents


def share_interval(found: int, tried: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share; 0 and 1 if nothing was tried."""
    if not tried:
        return 0.0, 1.0
    share, unit = found / tried, NORMAL**2 / tried
    middle = (share + unit / 2) / (1 + unit)
    reach = NORMAL * math.sqrt(share * (1 - share) / tried + unit / (4 * tried)) / (1 + unit)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def prompts_to_tell(share: float, threshold: float) -> int | None:
    """Return how many prompts would tell a share from a threshold by Wilson's interval.

    None if they are equal.
    """
    if share == threshold:
        return None
    return math.floor((NORMAL / (share - threshold)) ** 2 * threshold * (1 - threshold)) + 1


def share_text(found: int, tried: int) -> str:
    """Return a share with its 95% interval as text."""
    low, high = share_interval(found, tried)
    return f"{found / tried:.0%} ({low:.0%}-{high:.0%})" if tried else "-"
