# SPDX-License-Identifier: Apache-2.0
"""Cluster files: all that are shipped are read, and a mistake in one is told where it is."""

import pytest
import yaml

from recipes import cluster
from slurm.cluster_file import PLACEHOLDER, load


@pytest.mark.parametrize("name", ["local", *cluster.names()])
def test_every_shipped_file_is_read_whole(name):
    file = load(name)
    assert file.name == name
    assert (file.hardware is None) == (name == "local")
    assert file.executor == ("local" if name == "local" else "slurm")


def test_the_template_says_every_field_with_its_default():
    path = cluster.FOLDER / "template.yaml"
    said = path.read_text()
    file = load(str(path))
    for section in ("slurm", "container", "tunnel"):
        for name in type(getattr(file, section)).model_fields:
            assert f"{name}:" in said
    assert file.slurm == type(file.slurm)()
    assert file.slurm.account == file.container.image == PLACEHOLDER


def changed(tmp_path, **sections):
    """Return a copy of a shipped file with other sections."""
    given = yaml.safe_load((cluster.FOLDER / "dgx_h100.yaml").read_text()) | sections
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"slrum": {}}, "it has no field 'slrum'; did you mean slurm"),  # codespell:ignore
        ({"slurm": {"acct": "me"}}, "slurm has no field 'acct'; did you mean account"),
        ({"slurm": {"save_seconds": 5}}, "slurm.save_seconds is 5; it should be greater than"),
        ({"slurm": {"time": "4h"}}, "slurm.time is '4h'; write minutes, h:mm:ss or days-hours"),
        ({"slurm": {"time": 14400}}, "slurm.time is 14400; put it in quotes"),
        ({"slurm": {"exclusive": "yes"}}, "slurm.exclusive is 'yes'; it should be a valid boolean"),
        ({"container": {}}, "container.image is missing"),
        (
            {"executor": "slrum"},
            "executor is 'slrum'; it should be 'local', 'slurm'",
        ),  # codespell:ignore
        ({"tunnel": {"port": 0}}, "tunnel.port is 0; it should be greater than"),
        ({"environment": ["A=1"]}, "environment is"),
    ],
    ids=str,
)
def test_a_mistake_is_told_with_what_would_be_right(tmp_path, sections, said):
    with pytest.raises(ValueError, match=r"mine\.yaml: ") as told:
        load(changed(tmp_path, **sections))
    assert said in str(told.value)


def test_every_mistake_is_told_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"save_seconds is 5.*has no field 'acct'"):
        load(changed(tmp_path, slurm={"save_seconds": 5, "acct": "me"}))
