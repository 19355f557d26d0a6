# SPDX-License-Identifier: Apache-2.0
"""The oracles that take long: training, weights, evaluations, outcomes, folders of before."""

from pathlib import Path

ORACLES: dict = {}
TABLES: dict[str, tuple[str, ...]] = {}
BEFORE: list[str] = []


def environment(place: Path) -> dict[str, str]:
    """Return variables of the process that runs them; `place` is kept from run to run."""
    return {}
