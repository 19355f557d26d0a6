# SPDX-License-Identifier: Apache-2.0
"""Thresholds that the evaluation of a stage must meet before the next stage may start.

Five criteria; `None` disables one:

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
"""

import math
from dataclasses import dataclass, fields, replace

from recipes.spec.suggest import did_you_mean


class GateShutError(ValueError):
    """Raised when the next stage must not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Thresholds in nats per token, and a share of passkeys."""

    rise: float | None = 0.2
    forgotten: float | None = 0.2
    short: float | None = None
    passkey: float | None = None
    context_gain: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for thresholds out of range."""
        for name in ("rise", "forgotten", "short", "context_gain"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"gate {name} is {value:g} nats; it must be at least 0, or None")
        if self.passkey is not None and not 0 < self.passkey <= 1:
            raise ValueError(
                f"gate passkey is {self.passkey:g}; it must be a share, above 0 and up to 1"
            )


def gate_from(words: str, own: Gate) -> Gate:
    """Return `own` changed by, say, `passkey=0.9,rise=none`; raise ValueError for other words."""
    known = [field.name for field in fields(Gate)]
    said: dict[str, float | None] = {}
    for word in words.split(",") if words else ():
        name, _, value = word.partition("=")
        if name not in known:
            raise ValueError(f"a gate has no {name!r}; {did_you_mean(name, known)}")
        try:
            said[name] = None if value == "none" else float(value)
        except ValueError:
            raise ValueError(f"gate {name} is {value!r}; it must be a number, or none") from None
    return replace(own, **said)
