# SPDX-License-Identifier: Apache-2.0
"""Cluster files: all that are shipped are read, and a mistake in one is told where it is."""

import pytest
import yaml

from recipes.spec import cluster
from slurm.cluster_file import PLACEHOLDER, Preflight, load, seconds_of


@pytest.mark.parametrize("name", ["local", *cluster.names()])
def test_every_shipped_file_is_read_whole(name):
    file = load(name)
    assert file.name == name
    assert (file.hardware is None) == (name == "local")
    assert file.executor == ("local" if name in ("local", "rtx_4090") else "slurm")


def test_the_template_says_every_field_with_its_default():
    path = cluster.FOLDER / "template.yaml"
    said = path.read_text()
    file = load(str(path))
    for section in ("slurm", "container", "preflight", "tunnel"):
        for name in type(getattr(file, section)).model_fields:
            assert f"{name}:" in said
    assert file.slurm == type(file.slurm)()
    assert file.preflight == Preflight()
    assert file.slurm.account == file.container.image == PLACEHOLDER


def of_mount(mount):
    """Return a container with one mount."""
    return {"container": {"image": "/x.sqsh", "mounts": [mount]}}


def changed(tmp_path, **sections):
    """Return a copy of a shipped file with other sections."""
    given = yaml.safe_load((cluster.FOLDER / "dgx_h100.yaml").read_text()) | sections
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"slrum": {}}, "mine.yaml has no field 'slrum'; did you mean slurm"),  # codespell:ignore
        ({"slurm": {"acct": "me"}}, "slurm has no field 'acct'; did you mean account"),
        ({"slurm": {"save_seconds": 5}}, "slurm.save_seconds is 5; it should be greater than"),
        ({"slurm": {"time": "4h"}}, "slurm.time is '4h'; write minutes, h:mm:ss or days-hours"),
        ({"slurm": {"time": 14400}}, "slurm.time is 14400; put it in quotes"),
        ({"slurm": {"exclusive": "yes"}}, "slurm.exclusive is 'yes'; expected true or false"),
        ({"options": {"image": "x"}}, "options is of executors that launch no ladders; remove it"),
        ({"slurm": {"array": "0-3"}}, "slurm.array would run each job several times"),
        ({"hardware": None}, "has no mapping `hardware`"),
        ({"container": {}}, "container lacks 'image'; add it"),
        (
            {"executor": "slrum"},
            "executor is 'slrum'; it should be 'local' or 'slurm'",
        ),  # codespell:ignore
        ({"tunnel": {"port": 0}}, "tunnel.port is 0; it should be greater than"),
        ({"environment": ["A=1"]}, "environment is"),
        ({"slurm": {"save_seconds": 65536}}, "slurm.save_seconds is 65536; it should be less than"),
        ({"slurm": {"time": "0"}}, "to Slurm 0 means no limit"),
        ({"slurm": {"time": "10"}}, "slurm.save_seconds is 600; slurm.time is 10, 600 seconds: "),
        ({"slurm": {"sbatch": {"no-kill": False}}}, "slurm.sbatch.no-kill is False; leave it out"),
        ({"slurm": {"sbatch": {"x=1 y": 1}}}, "slurm.sbatch.x=1 y is 'x=1 y'; write the flag "),
        ({"slurm": {"sbatch": {"comment": "a\ntouch x"}}}, "slurm.sbatch.comment is 'a\\ntouch x'"),
        ({"slurm": {"srun": ["--a\n"]}}, "slurm.srun[0] is '--a\\n'; it has a line break"),
        ({"slurm": {"sbatch": {"comment": r"a\b"}}}, r"comment is 'a\\b'; leave out the backslash"),
        (
            {"slurm": {"srun": ["--mpi", "pmix"]}},
            "slurm.srun[1] is 'pmix'; write one complete flag",
        ),
        ({"slurm": {"srun": ["--mpi pmix"]}}, "slurm.srun[0] is '--mpi pmix'; write one complete"),
        (
            {"container": {"image": "~/x.sqsh"}},
            "container.image is '~/x.sqsh'; write a path in full",
        ),
        ({"container": {"image": "x:1; touch y"}}, "or [USER@][REGISTRY#]IMAGE[:TAG]"),
        (of_mount("/sh ared:/shared"), "container.mounts[0] is '/sh ared:/shared'; write SRC, "),
        (of_mount("$HOME/data:/data"), "'$HOME/data:/data'; write SRC, SRC:DST or SRC:DST:FLAGS"),
        (of_mount("/a$(touch y):/b"), "with paths in full: pyxis has no variables"),
        (of_mount("/a,b:/c"), "container.mounts[0] is '/a,b:/c'"),
        (of_mount("data:/data"), "container.mounts[0] is 'data:/data'"),
        (of_mount("/a:"), "container.mounts[0] is '/a:'; write SRC, SRC:DST or SRC:DST:FLAGS"),
        ({"container": None, "python": "/a:/b"}, "python is '/a:/b'; PATH, which gets it, "),
        (
            {"container": None, "slurm": {"sbatch": {"chdir": "/lustre/me/nemo_run"}}},
            "chdir is '/lustre/me/nemo_run'; without a container nemo-run replaces /nemo_run by",
        ),
        (
            {"container": None, "tunnel": {"folder": "/lustre/me/nemo_run"}},
            "tunnel.folder is '/lustre/me/nemo_run'; without a container nemo-run replaces",
        ),
        (
            {"tunnel": {"host": "h; touch y"}},
            "tunnel.host is 'h; touch y'; use letters, digits and",
        ),
        ({"tunnel": {"user": "-e x"}}, "tunnel.user is '-e x'; use letters, digits and"),
        ({"tunnel": {"identity": "~/my key"}}, "tunnel.identity is '~/my key'; use letters"),
        ({"tunnel": {"folder": "/x; y"}}, "tunnel.folder is '/x; y'; use letters, digits and"),
        (
            {"environment": {"A;touch x": 1}},
            "environment.A;touch x is 'A;touch x'; a name may have A",
        ),
        (
            {"environment": {"A": "1\nLONGHAUL_SCRIPT\ntouch x"}},  # would end what sbatch is given
            "environment.A is '1\\nLONGHAUL_SCRIPT\\ntouch x'; it has a line break",
        ),
        ({"environment": {"http_proxy": "x"}}, "nemo-run upper-cases names"),
        ({"preflight": {"least_drivr": "1"}}, "preflight has no field 'least_drivr'; did you mean"),
        (
            {"preflight": {"least_driver": 535.104}},
            "preflight.least_driver is 535.104; put it in q",
        ),
        (
            {"preflight": {"least_driver": "R580"}},
            "preflight.least_driver is 'R580'; write numbers",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_told_with_what_would_be_right(tmp_path, sections, said):
    with pytest.raises(ValueError, match=r"mine\.yaml") as told:
        load(changed(tmp_path, **sections))
    assert said in str(told.value)


def test_empty_sections_of_earlier_templates_are_passed_over(tmp_path):
    path = changed(tmp_path, options={}, slurm={"account": "me", "array": None})
    assert load(path).slurm.account == "me"


def test_every_mistake_is_told_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"has no field 'acct'.*save_seconds is 5"):
        load(changed(tmp_path, slurm={"save_seconds": 5, "acct": "me"}))


@pytest.mark.parametrize("field", ["account", "partition", "qos", "constraint", "exclude", "mem"])
def test_a_text_that_would_end_its_line_of_the_script_is_refused(tmp_path, field):
    with pytest.raises(ValueError, match=f"slurm.{field} is .*; it has a line break"):
        load(changed(tmp_path, slurm={field: "x\ntouch y"}))


def test_images_and_mounts_in_every_form_of_pyxis_are_read(tmp_path):
    images = (
        "/my images/x.sqsh",
        "./x.sqsh",
        "nvcr.io#nvidia/nemo:25.07",
        "me@acme.org:5000#x@sha256:0f",
    )
    mounts = ("/a", "./a:/b", "/a:/b:ro+rprivate", "tmpfs:/c", "umount:/d", "/e:/f:x-create=dir")
    for image in images:
        container = {"image": image, "mounts": list(mounts)}
        assert load(changed(tmp_path, container=container)).container.model_dump() == {
            "image": image, "mounts": mounts,
        }  # fmt: skip


def test_what_is_a_value_to_sbatch_is_kept(tmp_path):
    said = {"reservation": "nightly", "requeue": True, "nice": 0, "mail-type": "END,FAIL"}
    assert load(changed(tmp_path, slurm={"sbatch": said})).slurm.sbatch == said


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5_400),
        ("90:30", 5_430),
        ("04:00:00", 14_400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-12:30:05", 131_405),
    ],
)
def test_a_limit_in_each_of_slurm_s_forms_has_its_seconds(limit, seconds):
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize("limit", ["", "4h", "4:0", "1-", "1:00:00:00", "04:00:00\n", "UNLIMITED"])
def test_a_limit_of_another_form_is_refused(limit):
    with pytest.raises(ValueError, match="write minutes, h:mm:ss or days-hours"):
        seconds_of(limit)


def test_a_step_of_an_hour_leaves_time_to_save(tmp_path):
    file = load(changed(tmp_path, slurm={"time": "1-00:00:00", "save_seconds": 7200}))
    assert file.slurm.save_seconds == 7200
