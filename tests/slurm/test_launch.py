# SPDX-License-Identifier: Apache-2.0
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from slurm import launch


class HalfAChain:
    """An experiment of three jobs, the third of which the scheduler refuses."""

    def __init__(self) -> None:
        self._runner = object()
        self.cancelled: list[str] = []
        self.jobs = [
            SimpleNamespace(id=name, cancel=lambda _, name=name: self.cancelled.append(name))
            for name in ("prepare", "stage", "evaluate")
        ]

    def run(self, **_: bool) -> None:
        raise RuntimeError("QOSMaxSubmitJobPerUserLimit")


def test_the_half_of_a_chain_that_was_handed_over_is_cancelled(monkeypatch, tmp_path):
    chain = HalfAChain()
    monkeypatch.setattr(launch, "scripts", lambda *_: {})
    monkeypatch.setattr(launch, "_chain", lambda *_: nullcontext(chain))
    with pytest.raises(RuntimeError, match="QOSMaxSubmitJobPerUserLimit"):
        launch.submit("ladder", [], tmp_path)
    assert chain.cancelled == ["prepare", "stage", "evaluate"]
