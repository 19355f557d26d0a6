# SPDX-License-Identifier: Apache-2.0
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import nemo_run as run
import pytest

from slurm import launch
from slurm.local import local_executor


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


def test_ranks_start_in_any_folder_and_import_nothing_of_it(tmp_path, monkeypatch):
    folder = tmp_path / "Jürgen's ${app_id} books"
    folder.mkdir()
    (folder / "data.py").write_text("raise SystemExit('a file of the user was imported')")
    monkeypatch.chdir(folder)
    executor = local_executor(1)
    executor.env_vars["PYTHONSAFEPATH"] = ""  # Python 3.10 does not know it
    task = run.Partial(import_module, "data.store")
    launch.run_in_order("books", [launch.Job("imports", task, executor)], folder / "launch")
