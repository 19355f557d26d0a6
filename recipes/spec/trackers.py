# SPDX-License-Identifier: Apache-2.0
"""Trackers that a run can send its metrics to, and what each needs on this machine."""

import importlib.util
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.spec.suggest import did_you_mean

TREE = Path(__file__).resolve().parents[2]
"""The clone, which the extras are installed from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """One tracker."""

    name: str
    module: str
    """Module that it is imported as."""
    extra: str = ""
    """Extra of this distribution that brings it; empty if it is always installed."""
    variables: tuple[str, ...] = ()
    """Environment variables of which it needs one."""
    example: str = ""
    """A value of the first."""


TRACKERS = {
    tracker.name: tracker
    for tracker in (
        Tracker(name="tensorboard", module="tensorboard"),
        Tracker(name="wandb", module="wandb"),
        Tracker(name="mlflow", module="mlflow", extra="mlflow"),
        Tracker(name="trackio", module="trackio", extra="trackio"),
        Tracker(
            name="otel",
            module="opentelemetry.exporter.otlp.proto.http",
            extra="otel",
            variables=("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"),
            example="http://localhost:4318",
        ),
    )
}


def require_trackers(
    names: Iterable[str], *, here: bool = True, of_cluster: Mapping[str, object] | None = None
) -> tuple[str, ...]:
    """Return the trackers of these names, each once.

    `of_cluster` has the variables of the cluster file, which ranks elsewhere have besides those of
    this process; without it none is missed there. Raises ValueError for an unknown name, for a
    tracker whose package is missing if the ranks run `here`, with this Python, and for one whose
    variable is missing.
    """
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in TRACKERS:
            raise ValueError(f"no tracker is called {name!r}; {did_you_mean(name, list(TRACKERS))}")
        tracker = TRACKERS[name]
        if here and not _is_there(tracker.module):
            extra = shlex.quote(f"{TREE}[{tracker.extra}]")
            install = f"-e {extra}" if tracker.extra else tracker.module
            raise ValueError(
                f"--track {name} needs the package {tracker.module}: pip install {install}"
            )
        known = here or of_cluster is not None
        set_here = any(map(os.environ.get, tracker.variables))
        set_there = any(map((of_cluster or {}).get, tracker.variables))
        if tracker.variables and known and not (set_here or set_there):
            raise ValueError(
                f"--track {name} sends to an address that no variable states; set "
                f"{tracker.variables[0]}={tracker.example}"
            )
    return chosen


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it is in
        return False
