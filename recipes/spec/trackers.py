# SPDX-License-Identifier: Apache-2.0
"""Trackers that a run can send its metrics to, and what each needs on this machine."""

import importlib.util
import shlex
from collections.abc import Iterable
from pathlib import Path

from recipes.spec.suggest import did_you_mean

TREE = Path(__file__).resolve().parents[2]
"""The clone, which the extras are installed from."""
TRACKERS = {"tensorboard": "", "wandb": "", "mlflow": "mlflow"}
"""Modules, and the extra of this distribution that brings each; empty if it is always installed."""
GONE = ("trackio", "otel")


def require_trackers(names: Iterable[str], *, here: bool = True) -> tuple[str, ...]:
    """Return the trackers of these names, each once.

    Raises ValueError for an unknown name, and for a tracker whose package is missing if the ranks
    run `here`, with this Python.
    """
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name in GONE:
            raise ValueError(
                f"`--track {name}` is not in this release; `stages/NAME/metrics.jsonl` has every "
                "step for a collector to read (docs/metrics.md, Trackers)"
            )
        if name not in TRACKERS:
            raise ValueError(f"no tracker is called {name!r}; {did_you_mean(name, list(TRACKERS))}")
        if here and importlib.util.find_spec(name) is None:
            extra = TRACKERS[name]
            install = f"-e {shlex.quote(f'{TREE}[{extra}]')}" if extra else name
            raise ValueError(f"--track {name} needs the package {name}: pip install {install}")
    return chosen
