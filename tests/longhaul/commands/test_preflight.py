# SPDX-License-Identifier: Apache-2.0
"""`longhaul preflight --cluster`: this machine held to all that a job of the file would be."""

import json
import os
from functools import partial
from unittest import mock

import pytest
import typer
import yaml
from typer.testing import CliRunner

from longhaul.commands.preflight import preflight
from recipes.spec import cluster
from slurm.preflight.machine import Machine
from tests.slurm.preflight.support import samples

UNSET = ("RANK", "SLURM_PROCID", "NCCL_IB_HCA", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture
def dgx(tmp_path, monkeypatch):
    """Make nvidia-smi that of a DGX H100, its variables unset; return a file to hold it to."""
    folder = samples.nvidia_smi(tmp_path / "bin", rows=samples.listed())
    without = partial(Machine, infiniband=tmp_path / "infiniband")
    monkeypatch.setattr("slurm.preflight.machine.Machine", without)
    clean = {key: value for key, value in os.environ.items() if key not in UNSET}
    clean["PATH"] = f"{folder}{os.pathsep}{clean['PATH']}"
    given = yaml.safe_load((cluster.FOLDER / "dgx_h100.yaml").read_text())
    path = tmp_path / "site.yaml"
    with mock.patch.dict(os.environ, clean, clear=True):
        yield lambda **sections: path.write_text(yaml.safe_dump(given | sections)) and str(path)


def states(file: str, *options: str) -> dict[str, tuple[str, str]]:
    """Return state and words of each check of a page, by its name."""
    app = typer.Typer()
    app.command()(preflight)
    words = ["--cluster", file, "--layout", "tp2 ulysses4 dp2", "--json", *options]
    told = CliRunner().invoke(app, words)
    return {row["name"]: (row["state"], row["said"]) for row in json.loads(told.output)["checks"]}


def test_the_file_s_environment_is_set_as_in_a_job_and_its_hca_asked_for(dgx):
    found = states(dgx())
    assert found["connections"] == ("ok", "CUDA_DEVICE_MAX_CONNECTIONS is 1")
    assert found["HCA"][1].startswith("NCCL_IB_HCA=mlx5: no HCA is called mlx5")
    assert found["driver"][0] == found["clocks"][0] == "ok"


def test_what_is_set_already_stays_and_is_held_to_the_file(dgx, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("NCCL_IB_HCA", "=mlx5_0")
    found = states(dgx())
    assert found["connections"][0] == "failure"
    assert found["HCA"] == ("failure", "NCCL_IB_HCA is =mlx5_0; the cluster has mlx5")


def test_thresholds_of_the_file_fail_and_warn(dgx, tmp_path):
    file = dgx(
        preflight={
            "least_driver": "580", "least_sm_clock_mhz": 2000, "least_write_mbps": 1e9,
            "free_gib": 2**40,
        }
    )  # fmt: skip
    found = states(file, "--run", str(tmp_path / "run"))
    names = ("driver", "clocks", "free space", "run folder")
    assert [found[name][0] for name in names] == ["failure"] * 3 + ["warning"]
