# SPDX-License-Identifier: Apache-2.0
import importlib.util
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
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    there = importlib.util.find_spec

    def find(module: str) -> object:
        return None if module == TRACKERS[name].module else there(module)

    monkeypatch.setattr(trackers.importlib.util, "find_spec", find)
    with pytest.raises(ValueError, match=f"--track {name} needs the package .*: pip install "):
        require_trackers([name])
    assert require_trackers([name], here=False) == (name,)


def test_opentelemetry_without_an_address_is_refused(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", raising=False)
    with pytest.raises(ValueError, match="set OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318"):
        require_trackers(["otel"], here=False, of_cluster={})


def test_the_command_that_installs_a_tracker_works_in_any_folder(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match="pip install") as refused:
        require_trackers(["mlflow"])
    *_, path = shlex.split(str(refused.value))
    assert (Path(path.removesuffix("[mlflow]")) / "pyproject.toml").is_file()


def test_a_variable_may_be_one_of_the_cluster_file_and_is_not_missed_before_it_is_read(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", raising=False)
    of_cluster = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    assert require_trackers(["otel"], here=False, of_cluster=of_cluster) == ("otel",)
    assert require_trackers(["otel"], here=False) == ("otel",)
    with pytest.raises(ValueError, match="set OTEL_EXPORTER_OTLP_ENDPOINT"):
        require_trackers(["otel"], here=False, of_cluster={"OTHER": "1"})
