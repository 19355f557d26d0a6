# SPDX-License-Identifier: Apache-2.0
"""Constraints of a stage's schedule."""

from collections.abc import Iterator


def violations(*, max_steps: int, lr: float) -> Iterator[str]:
    """Yield one sentence for each violated constraint of the schedule."""
    if max_steps < 1:
        yield f"max_steps is {max_steps}; a stage has at least one step"
    if not 0 < lr < 1:
        yield f"the learning rate is {lr:g}; it must lie between 0 and 1"
