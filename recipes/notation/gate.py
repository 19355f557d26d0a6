# SPDX-License-Identifier: Apache-2.0
"""The gate of a stage in a ladder file, and the suites that the ladder runs.

suites:                                 # of the ladder
  - {tasks: [hellaswag, gsm8k], limit: 500}
  - {tasks: [niah_single_1], lengths: [4K, 8K], include: tasks}
gate:                                   # of a stage
  short: 0.05
  context_gain: 0.02
  suites:
    - {task: hellaswag, drop: 0.02, metric: acc_norm}
    - {task: niah_single_1, length: 8K, least: 0.9}
  ruler: {samples: ruler/ruler-offline-a6356495dfaa, length: 8K, least: {vt: 0.9, mean: 0.8}}

Folders are relative to that of the file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.spec.gate import Gate
from recipes.spec.naming import length_from
from recipes.spec.schema import decode
from recipes.spec.suites import SuiteRun

LENGTHS = ("length", "lengths")


def read(stated: Mapping[str, Any], folder: Path) -> Gate:
    """Return the gate of a mapping; raise ValueError with the place of what it cannot have."""
    gate = decode(Gate, _with_lengths(stated), "gate")
    if gate.ruler is None:
        return gate
    return replace(gate, ruler=replace(gate.ruler, samples=_below(folder, gate.ruler.samples)))


def read_suites(stated: Iterable[Mapping[str, Any]], folder: Path) -> tuple[SuiteRun, ...]:
    """Return the suites of a ladder; raise ValueError with the place of what they cannot have."""
    found = (decode(SuiteRun, _with_lengths(row), f"suites[{at}]") for at, row in enumerate(stated))
    return tuple(
        replace(suite, include=_below(folder, suite.include)) if suite.include else suite
        for suite in found
    )


def _below(folder: Path, word: str) -> str:
    return str((folder / word).resolve())


def _with_lengths(value: Any, name: str = "") -> Any:
    if isinstance(value, list):
        return [_with_lengths(each, name) for each in value]
    if isinstance(value, Mapping):
        return {key: _with_lengths(each, str(key)) for key, each in value.items()}
    return length_from(value) if name in LENGTHS and isinstance(value, str) else value
