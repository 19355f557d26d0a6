# SPDX-License-Identifier: Apache-2.0
"""What an evaluated stage has to show before the next one may start; light.

Three judgements, each of which `None` leaves out:

* `rise`: loss by position. A model whose context works predicts better the more it has read, so
  its mean loss over the last quarter of the context is not above that over the second by more nats.
* `forgotten`: the positions that the stage before reached already. Their mean loss is not above
  what it was before this stage by more nats.
* `passkey`: the share of passkeys found, over the whole grid, is at least this.
"""

import math
from dataclasses import dataclass, fields, replace

from recipes.spec.suggest import hint


class GateShutError(ValueError):
    """Say why the next stage must not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Thresholds in nats a token, and a share of passkeys."""

    rise: float | None = 0.2
    forgotten: float | None = 0.2
    passkey: float | None = None

    def __post_init__(self) -> None:
        """Refuse thresholds that judge nothing."""
        for name in ("rise", "forgotten"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"gate {name} is {value:g} nats; it must be at least 0, or None")
        if self.passkey is not None and not 0 < self.passkey <= 1:
            raise ValueError(
                f"gate passkey is {self.passkey:g}; it is a share, above 0 and up to 1"
            )


def gate_from(words: str, own: Gate) -> Gate:
    """Return a gate with what `passkey=0.9,rise=none` says; raise ValueError for anything else."""
    known = [field.name for field in fields(Gate)]
    said: dict[str, float | None] = {}
    for word in words.split(",") if words else ():
        name, _, value = word.partition("=")
        if name not in known:
            raise ValueError(f"a gate has no {name!r}; {hint(name, known)}")
        try:
            said[name] = None if value == "none" else float(value)
        except ValueError:
            raise ValueError(f"gate {name} is {value!r}; it is a number, or none") from None
    return replace(own, **said)
