# SPDX-License-Identifier: Apache-2.0
"""Thresholds that the evaluation of a stage must meet before the next stage may start.

`None`, or no threshold, disables a criterion:

* `rise`: loss by position. A model that uses its context predicts better the more it has read, so
  its mean loss over the last quarter of the context may exceed that over the second by at most
  this many nats.
* `forgotten`: the positions that the previous stage already reached. Their mean loss may exceed
  that after the previous stage by at most this many nats.
* `short`: short documents, read whole and alone. Their mean loss may exceed that after the previous
  stage by at most this many nats.
* `passkey`: the minimum share of passkeys found over the whole grid.
* `context_gain`: the last tokens of each window, read with the whole window and with the fewest
  tokens before them. The loss must fall by at least this many nats.
* `suites`: tasks of lm-evaluation-harness that the ladder's `suites` run, each with a least score,
  or with the most that it may lose against the model before the stage.
* `ruler`: samples of `longhaul ruler make`, with the least score of tasks, or of their mean.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from recipes.spec.suggest import did_you_mean


class GateShutError(ValueError):
    """Raised when the next stage must not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteThreshold:
    """Least score of a task or group of lm-evaluation-harness, or the most that it may lose."""

    task: str
    least: float | None = None
    """In the task's own unit; most scores are shares of 1."""
    drop: float | None = None
    """Against the model before the stage; for a score that is better if lower, its rise."""
    length: int | None = None
    """Length of the prompts, for a task that makes them."""
    metric: str | None = None
    """Such as `acc_norm`, with a filter `exact_match,strict-match`; None for the task's first."""

    def __post_init__(self) -> None:
        """Raise ValueError for thresholds out of range, and for none."""
        if self.least is None and self.drop is None:
            raise ValueError(f"{self.named} has no threshold; state least, drop or both")
        if self.least is not None and not math.isfinite(self.least):
            raise ValueError(f"{self.named} has least {self.least:g}; it must be a finite score")
        if self.drop is not None and not 0 <= self.drop < math.inf:
            raise ValueError(f"{self.named} has drop {self.drop:g}; it must be at least 0")
        if self.length is not None and self.length < 1:
            raise ValueError(f"{self.named} has length {self.length}; it must be positive")

    @property
    def named(self) -> str:
        """What it judges, in words."""
        at = "" if self.length is None else f" at {self.length:,}"
        of_metric = "" if self.metric is None else f" ({self.metric})"
        return f"suites {self.task}{at}{of_metric}"


MEAN = "mean"
"""Name of the average over all tasks of a length among the thresholds of RULER."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RulerThresholds:
    """Least scores on sample files of `longhaul ruler make`, at one length."""

    samples: str
    """Folder of the files, with their manifest."""
    least: Mapping[str, float] = field(hash=False)
    """Least score of tasks by name, and of their `mean`, as shares of 1."""
    length: int | None = None
    """Tokens of prompt and answer together; None for the context of the stage."""
    limit: int | None = None
    """Samples of each file, at most; None for all."""

    def __post_init__(self) -> None:
        """Raise ValueError for no thresholds, and for those out of range."""
        if not self.samples:
            raise ValueError("gate ruler names no samples; state the folder of `ruler make`")
        if not self.least:
            raise ValueError("gate ruler has no threshold; state least, such as {mean: 0.8}")
        for task, least in self.least.items():
            if not 0 < least <= 1:
                raise ValueError(
                    f"gate ruler has {least:g} for {task}; scores are shares, above 0 and up to 1"
                )
        for name in ("length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"gate ruler has {name} {value}; it must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Thresholds in nats per token, a share of passkeys, and scores of suites and RULER."""

    rise: float | None = 0.2
    forgotten: float | None = 0.2
    short: float | None = None
    passkey: float | None = None
    context_gain: float | None = None
    suites: tuple[SuiteThreshold, ...] = ()
    ruler: RulerThresholds | None = None

    @property
    def of_evaluation(self) -> "Gate":
        """The thresholds that an evaluation is judged by, without those of scores."""
        return replace(self, suites=(), ruler=None)

    def __post_init__(self) -> None:
        """Raise ValueError for thresholds out of range; lists become tuples."""
        for name in ("rise", "forgotten", "short", "context_gain"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(
                    f"gate {name} is {value:g} nats; it must be at least 0, or null for none"
                )
        if self.passkey is not None and not 0 < self.passkey <= 1:
            raise ValueError(
                f"gate passkey is {self.passkey:g}; it must be a share, above 0 and up to 1"
            )
        object.__setattr__(self, "suites", tuple(self.suites))
        named = [threshold.named for threshold in self.suites]
        for each in named:
            if named.count(each) > 1:
                raise ValueError(f"the gate has two thresholds of {each}; state it once")


def gate_from(words: str, own: Gate) -> Gate:
    """Return `own` changed by, say, `passkey=0.9,rise=none`; raise ValueError for other words."""
    known = [each.name for each in fields(Gate) if each.name not in ("suites", "ruler")]
    said: dict[str, Any] = {}
    for word in words.split(",") if words else ():
        name, _, value = word.partition("=")
        if name not in known:
            raise ValueError(f"a gate has no {name!r}; {did_you_mean(name, known)}")
        try:
            said[name] = None if value == "none" else float(value)
        except ValueError:
            raise ValueError(f"gate {name} is {value!r}; it must be a number, or none") from None
    return replace(own, **said)
