# SPDX-License-Identifier: Apache-2.0
import shlex
from pathlib import Path

import pytest

from recipes.spec import trackers
from recipes.spec.trackers import TRACKERS, require_trackers


def test_names_are_given_back_once_in_their_order():
    assert require_trackers(["wandb", "tensorboard", "wandb"]) == ("wandb", "tensorboard")
    assert require_trackers([]) == ()


def test_an_unknown_tracker_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"no tracker is called 'wandbb'; did you mean wandb\?"):
        require_trackers(["wandbb"])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_without_its_package_is_refused_with_the_command(name, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match=f"--track {name} needs the package .*: pip install "):
        require_trackers([name])
    assert require_trackers([name], here=False) == (name,)


def test_the_command_that_installs_a_tracker_works_in_any_folder(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match="pip install") as refused:
        require_trackers(["mlflow"])
    *_, path = shlex.split(str(refused.value))
    assert (Path(path.removesuffix("[mlflow]")) / "pyproject.toml").is_file()


@pytest.mark.parametrize("name", ["otel", "trackio"])
def test_a_tracker_of_before_is_answered_with_what_replaces_it(name):
    with pytest.raises(
        ValueError, match=f"--track {name}` is not in this release; .*metrics.jsonl"
    ):
        require_trackers([name])
