# SPDX-License-Identifier: Apache-2.0
"""Checks of the loss: not finite, a spike, and a slow divergence; light.

A stage begins with a jump: the longer context is new to the model. So nothing is said about the
level of the loss in the warm-up, and what comes after it is compared with its own best.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from longhaul.health.thresholds import (
    DIVERGENCE_NATS,
    DIVERGENCE_NOISE,
    DIVERGENCE_STEPS,
    FEWEST,
    QUIET_STEPS,
    SPIKE_BEFORE,
    SPIKE_NATS,
    SPIKE_NOISE,
)
from recipes.spec.finding import Finding

Line = Mapping[str, Any]
OF_NORMAL = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""


def number(line: Line, key: str) -> float:
    """Return a figure of a line; NaN if it has none."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


def not_finite(lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield a finding if the loss or the gradient norm of the last line is NaN or infinite."""
    if not lines:
        return
    for key, what in (("loss", "the loss"), ("grad_norm", "the norm of the gradient")):
        value = lines[-1].get(key)
        if not isinstance(value, float) or math.isfinite(value):
            continue
        bad = [line for line in lines if isinstance(line.get(key), float)]
        since = len(bad)
        while since and not math.isfinite(bad[since - 1][key]):
            since -= 1
        first = bad[since]["step"]
        yield Finding(
            kind="not_finite",
            step=first,
            said=f"{what} is {value} since step {first}",
            cause="a document, a learning rate that is too high, or an overflow",
            remedy="the guard of the loss rewinds a run by itself; `longhaul doctor spike --run "
            "RUN` shows what is around the step",
        )
        return


def after_warmup(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with a finite loss, from the one with the highest learning rate on.

    While the rate still rises there are none. Steps of other lengths, of which a mix may have some,
    have another loss: those of the most frequent length are returned.
    """
    rates = [number(line, "lr") for line in lines]
    known = [rate for rate in rates if math.isfinite(rate)]
    top = rates.index(max(known)) if known else 0
    if top == len(lines) - 1:
        return []
    late = [line for line in lines[top:] if math.isfinite(number(line, "loss"))]
    lengths = Counter(line.get("seq_length") for line in late)
    if len(lengths) > 1:
        usual = lengths.most_common(1)[0][0]
        late = [line for line in late if line.get("seq_length") == usual]
    return late


def spike(lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield a finding if one of the last steps has a loss far above that of the steps before."""
    late = after_warmup(lines)
    for at in range(max(FEWEST, len(late) - QUIET_STEPS), len(late)):
        before = [line["loss"] for line in late[max(0, at - SPIKE_BEFORE) : at]]
        usual = median(before)
        noise = OF_NORMAL * median(abs(loss - usual) for loss in before)
        loss = late[at]["loss"]
        if loss - usual > max(SPIKE_NATS, SPIKE_NOISE * noise):
            yield Finding(
                kind="spike",
                step=late[at]["step"],
                said=f"the loss is {loss:.3f}, {loss - usual:.2f} nats above the median of the "
                f"{len(before)} steps before",
                cause="documents of another kind, or a learning rate that is too high",
                remedy="the guard of the loss rewinds at 2 nats; `longhaul doctor spike --run RUN` "
                "tells a fault from the jump of an extension",
            )
            return


def divergence(lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield a finding if the mean loss has risen over its best, and stays there."""
    late = after_warmup(lines)
    losses = [line["loss"] for line in late]
    fewest, most = DIVERGENCE_STEPS
    width = min(most, len(losses) // 6)
    if width < fewest // 2 or len(losses) < 3 * fewest:
        return
    width = max(width, fewest)
    running = sum(losses[:width])
    sums = [running]
    for at in range(width, len(losses)):
        running += losses[at] - losses[at - width]
        sums.append(running)
    best = min(range(len(sums)), key=sums.__getitem__)
    rise = (sums[-1] - sums[best]) / width
    changes = [abs(after - before) for before, after in itertools.pairwise(losses)]
    # The change between neighbours has sqrt(2) times the deviation of a loss, whatever the trend.
    noise = OF_NORMAL * median(changes) / math.sqrt(2)
    least = max(DIVERGENCE_NATS, DIVERGENCE_NOISE * noise * math.sqrt(2 / width))
    half, lowest = width // 2, sums[best] / width
    recovers = fmean(losses[-half:]) - lowest <= least
    if rise <= least or recovers or best + width > len(losses) - half:
        return
    since = next(at for at in range(best + width - 1, len(losses)) if losses[at] > lowest)
    yield Finding(
        kind="divergence",
        step=late[since]["step"],
        said=f"the mean loss of {width} steps rose from {lowest:.3f} (steps "
        f"{late[best]['step']} to {late[best + width - 1]['step']}) to {sums[-1] / width:.3f}, by "
        f"{rise:.3f} nats, and does not come back",
        cause="a learning rate that is too high for this length, or data of another kind since "
        "that step",
        remedy="compare rows_by_source of the steps in metrics.jsonl and the held-out loss "
        "(--eval-every); resume from a checkpoint before that step with a lower rate "
        "(optim.config.lr)",
    )
