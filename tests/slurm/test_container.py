# SPDX-License-Identifier: Apache-2.0
"""The container without a container engine: its files are read, and its install script runs."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slurm.container import versions
from tests.house.rooms import ROOMS, TREE

CONTAINER = TREE / "slurm" / "container"
SCRIPTS = Path(sys.executable).parent
PINS = dict(
    re.findall(r"^([\w.-]+)==([^ ;]+) \\$", (CONTAINER / "lock.txt").read_text(), re.MULTILINE)
)
PYTHON_OF_IMAGE = "3.12"
RIGHT_IMAGE = {
    "torch": "2.9.0a0+50eac811a6.nv25.09",
    "transformer-engine": "2.9.0+70f53666",
    "flash-attn": "2.7.4.post1+25.9",
}


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and what follows each, on one line."""
    text = (CONTAINER / "Dockerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line]


def said(word: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == word]


def plant(site: Path, distributions: dict[str, str], *, needs: tuple[str, ...] = ()) -> None:
    """Write the metadata of distributions, which is all that the checks read."""
    for name, number in distributions.items():
        folder = site / f"{name.replace('-', '_')}-{number}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (folder / "METADATA").write_text(text + "".join(f"Requires-Dist: {n}\n" for n in needs))
        (folder / "RECORD").touch()


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    return run(SCRIPTS / "hadolint", "--no-color", "-c", CONTAINER / "hadolint.yaml", dockerfile)


def test_hadolint_finds_nothing():
    assert hadolint(CONTAINER / "Dockerfile").stdout == ""


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        (":${NEMO_TAG}${NEMO_DIGEST:+@}${NEMO_DIGEST}", ":latest", "DL3007"),
        ("nvcr.io/", "docker.io/", "DL3026"),
        ("USER ${USER_ID}:${GROUP_ID}", "USER root", "DL3002"),
    ],
)
def test_hadolint_finds_what_the_dockerfile_must_not_do(tmp_path, before, after, rule):
    text = (CONTAINER / "Dockerfile").read_text()
    assert before in text
    (tmp_path / "Dockerfile").write_text(text.replace(before, after))
    assert rule in hadolint(tmp_path / "Dockerfile").stdout


def test_shellcheck_finds_nothing():
    done = run(SCRIPTS / "shellcheck", *sorted(CONTAINER.glob("*.sh")))
    assert (done.returncode, done.stdout) == (0, "")


def test_the_last_user_is_not_root_and_the_container_says_whether_it_is_well():
    assert said("USER") == ["${USER_ID}:${GROUP_ID}"]
    assert {"USER_ID=1000", "GROUP_ID=1000"} <= {*said("ARG")}
    (health,) = said("HEALTHCHECK")
    assert health.endswith('["python", "-m", "slurm.container.versions", "health"]')


def test_the_image_is_labelled_with_where_it_comes_from():
    (labels,) = said("LABEL")
    keys = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", labels))
    assert {"source", "version", "revision", "licenses", "base.name", "base.digest"} <= keys


def test_the_dockerfile_holds_no_secret_and_fetches_nothing_but_the_lock():
    text = (CONTAINER / "Dockerfile").read_text()
    assert not re.search(r"token|password|secret|credential|api_?key", text, re.IGNORECASE)
    assert not re.search(r"\b(apt|apt-get|curl|wget|git clone|pip)\b", " ".join(said("RUN")))
    assert said("COPY") + said("ADD") == []


def test_the_guide_names_the_tag_that_is_built_on():
    tags = set(re.findall(r"NEMO_TAG=(\S+)", (CONTAINER / "Dockerfile").read_text()))
    guide = (TREE / "docs" / "containers.md").read_text()
    assert tags == set(re.findall(r"nvcr\.io/nvidia/nemo:([\d.]+)", guide))


def test_the_guide_s_table_of_replacements_is_that_of_the_lock():
    guide = (TREE / "docs" / "containers.md").read_text()
    rows = dict(re.findall(r"^\| ([\w -]+) \| ([\d.]+) \| [^|]+\| (?:kept|replaced) ", guide, re.M))
    assert rows.pop("Transformer Engine") == "2.9"  # never in the lock: the image's is kept
    assert rows == {
        "ModelOpt": PINS["nvidia-modelopt"],
        "resiliency extension": PINS["nvidia-resiliency-ext"],
        "Megatron-Core": PINS["megatron-core"],
        "NeMo": PINS["nemo-toolkit"],
        "NeMo Run": PINS["nemo-run"],
    }


def test_the_build_gets_what_the_package_is_built_from_and_nothing_else():
    lines = (CONTAINER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_through = {line[1:] for line in rules if line.startswith("!")}
    assert let_through == {*ROOMS, "pyproject.toml", "README.md", "LICENSE"}


def ours() -> list[Requirement]:
    """Return what pyproject.toml requires of the container, NVIDIA's torch apart."""
    wanted = [Requirement(text) for text in requires("longhaul-recipes")]
    image = {"python_version": PYTHON_OF_IMAGE}
    applying = [
        one
        for one in wanted
        if one.marker is None
        or any(one.marker.evaluate(image | {"extra": extra}) for extra in ("", *versions.EXTRAS))
    ]
    assert len(applying) > 15
    return [one for one in applying if not versions.stays(one.name)]


def test_the_lock_satisfies_what_pyproject_requires():
    missing = [
        str(one)
        for one in ours()
        if PINS.get(canonicalize_name(one.name)) is None
        or not one.specifier.contains(PINS[canonicalize_name(one.name)], prereleases=True)
    ]
    assert missing == []


def test_every_pin_has_its_hashes_and_none_is_nvidias_own():
    pins = re.split(r"^(?=[a-z0-9])", (CONTAINER / "lock.txt").read_text(), flags=re.MULTILINE)[1:]
    assert len(pins) == len(PINS) > 200
    assert [pin for pin in pins if "--hash=sha256:" not in pin] == []
    assert [name for name in PINS if versions.stays(name)] == []


def test_the_container_has_the_versions_that_the_tests_run_with():
    text = (TREE / "constraints-py311.txt").read_text()
    tested = {
        canonicalize_name(name): number
        for name, number in re.findall(r"^([^=\s]+)==(\S+)$", text, re.MULTILINE)
    }
    both = PINS.keys() & tested.keys()
    assert len(both) > 200
    assert {n: (PINS[n], tested[n]) for n in both if PINS[n] != tested[n]} == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the lock's fiddle needs Python 3.11")
def test_the_installed_environment_agrees_with_the_lock_for_our_pins():
    python = "constraints-py{}{}.txt".format(*sys.version_info[:2])
    if not (TREE / python).exists():
        pytest.skip(f"no {python}: this environment was made from ranges")
    names = [one.name for one in ours() if one.marker is None or "extra" not in str(one.marker)]
    installed = {name: version(name) for name in names}
    assert installed == {name: PINS[canonicalize_name(name)] for name in names}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pyproject.toml is read by tomllib")
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, []),
        ({"transformer-engine": "2.12.0"}, ["transformer-engine 2.12.0"]),
        ({"torch": "2.13.0"}, ["torch 2.13.0"]),
    ],
    ids=["the right image", "Transformer Engine of 26.02", "torch from an index"],
)
def test_an_image_is_compared_with_our_pins(tmp_path, monkeypatch, change, fault):
    plant(tmp_path, RIGHT_IMAGE | change)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(versions.image_faults(TREE / "pyproject.toml"))
    assert [text.partition(" in the image")[0] for text in found] == fault


def test_a_replaced_torch_and_a_second_cudnn_are_noticed(tmp_path, monkeypatch):
    plant(tmp_path, RIGHT_IMAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = versions.kept()
    assert {f"{name}=={number}" for name, number in RIGHT_IMAGE.items()} <= {*before}
    newer = tmp_path / "newer"
    plant(newer, {"torch": "2.13.0", "nvidia-cudnn-cu13": "9.99"})
    monkeypatch.syspath_prepend(str(newer))
    monkeypatch.setattr(versions, "unmet", lambda *_: iter(()))
    assert {
        f"torch=={RIGHT_IMAGE['torch']} of the image is missing",
        "torch==2.13.0 was added to those of the image",
        "nvidia-cudnn-cu13==9.99 was added to those of the image",
    } <= {*versions.installed_faults(before)}


def test_an_unmet_requirement_is_named_with_who_needs_it(tmp_path, monkeypatch):
    plant(tmp_path, {"whole": "1"}, needs=("part>=2", "torch==99", "other; extra == 'more'"))
    plant(tmp_path, {"part": "1"}, needs=("deeper",))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(versions.unmet("whole")) == ["whole needs part>=2, and 1 is installed"]
    assert len(list(versions.unmet("whole", frozenset({"more"})))) == 2


def test_a_checkout_that_python_would_import_before_our_pin_is_noticed(tmp_path, monkeypatch):
    assert list(versions.shadowed()) == []
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    code = "from slurm.container.versions import shadowed; print(*shadowed(), sep='\\n')"
    done = run(sys.executable, "-c", code, PYTHONPATH=f"{tmp_path}:{TREE}")
    assert f"megatron.core comes from {tmp_path}" in done.stdout


def test_the_environment_of_the_tests_is_healthy():
    monkey = list(versions.unmet("longhaul-recipes"))
    assert monkey == []


def test_the_lock_loses_what_stays_nvidias():
    resolved = (
        "numpy==1 \\\n    --hash=a\ntorch==2 \\\n    --hash=b\nnvidia-nccl-cu13==3\nzarr==4\n"
    )
    assert versions.without_the_images(resolved) == "numpy==1 \\\n    --hash=a\nzarr==4\n"


def virtual_environment(folder: Path, image: dict[str, str]) -> tuple[Path, Path]:
    """Return the Python and the site-packages of a new environment with an image's metadata."""
    venv.create(folder, with_pip=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    plant(site, image)
    return folder / "bin" / "python", site


def tree_with_lock(folder: Path, wheel: Path, digest: str) -> Path:
    """Write a tree whose lock is one wheel, and return its install script."""
    target = folder / "slurm" / "container"
    target.mkdir(parents=True)
    for name in ("install.sh", "versions.py"):
        shutil.copy(CONTAINER / name, target)
    shutil.copy(TREE / "pyproject.toml", folder)
    name, number = wheel.name.split("-")[:2]
    (target / "lock.txt").write_text(f"{name}=={number} --hash=sha256:{digest}\n")
    return target / "install.sh"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pyproject.toml is read by tomllib")
def test_pins_come_from_a_folder_of_wheels_once_the_image_and_the_hash_are_right(tmp_path):
    python, site = virtual_environment(tmp_path / "venv", RIGHT_IMAGE)
    (site / "tests.pth").write_text(sysconfig.get_path("purelib"))  # for `packaging`
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "pinned-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pinned.py", "")
        archive.writestr(
            "pinned-1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: pinned\nVersion: 1\nRequires-Dist: torch==2.13.0\n",
        )
        text = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("pinned-1.dist-info/WHEEL", text)
        archive.writestr("pinned-1.dist-info/RECORD", "")
    kept = tmp_path / "kept" / "image.txt"
    environment = {"PYTHON": str(python), "KEPT": str(kept), "PIP_CONSTRAINT": "not-there.txt"}

    wrong = tree_with_lock(tmp_path / "wrong", wheel, "0" * 64)
    refused = run("bash", wrong, "pins", wheels, **environment)
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (site / "pinned.py").exists()

    right = tree_with_lock(
        tmp_path / "right", wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()
    )
    done = run("bash", right, "pins", wheels, **environment)
    assert done.returncode == 0, done.stderr
    assert (site / "pinned.py").exists()
    assert f"torch=={RIGHT_IMAGE['torch']}" in kept.read_text().split()

    (site / "pinned.py").unlink()
    shutil.rmtree(next(site.glob("transformer_engine*")))
    plant(site, {"transformer-engine": "2.12.0"})
    other = run("bash", right, "pins", wheels, **environment)
    assert other.returncode == 1
    assert "transformer-engine 2.12.0 in the image, which needs <2.10,>=2.9" in other.stderr
    assert not (site / "pinned.py").exists()


def repository(folder: Path) -> Path:
    """Return a clean repository with the build script in it."""
    (folder / "slurm" / "container").mkdir(parents=True)
    shutil.copy(CONTAINER / "build.sh", folder / "slurm" / "container")
    shutil.copy(TREE / "pyproject.toml", folder)
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    remote = "https://ada:hidden@example.org/longhaul.git"
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        assert run(*git, *command).returncode == 0
    run(*git, "remote", "add", "origin", remote)
    return folder


def test_a_build_names_the_commit_and_hides_the_credentials_of_its_remote(tmp_path):
    tree = repository(tmp_path / "tree")
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    path = f"{docker.parent}:{os.environ['PATH']}"
    script = tree / "slurm" / "container" / "build.sh"
    done = run("bash", script, "--build-arg", "USER_ID=2000", PATH=path)
    assert done.returncode == 0, done.stderr
    revision = run("git", "-C", tree, "rev-parse", "HEAD").stdout.strip()
    given = done.stdout.split()
    assert f"REVISION={revision}" in given
    assert f"VERSION={version('longhaul-recipes')}" in given
    assert "USER_ID=2000" in given
    assert "SOURCE=https://example.org/longhaul.git" in given
    assert re.search(r"SOURCE_DATE_EPOCH=\d{9,}", done.stdout)
    declared = {name.partition("=")[0] for name in said("ARG")}
    assert {text.partition("=")[0] for text in given if re.match(r"[A-Z_]+=", text)} <= declared


def test_a_build_of_a_changed_tree_is_refused(tmp_path):
    tree = repository(tmp_path)
    (tree / "new.py").touch()
    done = run("bash", tree / "slurm" / "container" / "build.sh", PATH=os.environ["PATH"])
    assert done.returncode == 1
    assert "no commit holds" in done.stderr


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the lock is for Python 3.11 and newer")
def test_the_dockerfiles_install_steps_work_in_a_clean_environment(tmp_path):
    tree, nothing = tmp_path / "tree", tmp_path / "wheels"
    nothing.mkdir()
    for room in ROOMS:
        shutil.copytree(TREE / room, tree / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TREE / name, tree)
    python, site = virtual_environment(tmp_path / "venv", RIGHT_IMAGE)
    packaging = f"packaging=={PINS['packaging']}"  # NVIDIA's image has one
    assert run(python, "-m", "pip", "install", "--no-deps", packaging).returncode == 0
    (epoch,) = (text for text in said("ARG") if text.startswith("SOURCE_DATE_EPOCH="))
    environment = {
        "PYTHON": str(python),
        "KEPT": str(tmp_path / "image.txt"),
        "SOURCE_DATE_EPOCH": epoch.partition("=")[2],
        "PIP_NO_COMPILE": "1",  # nobody reads it here
    }
    steps = re.findall(r"bash /src/(\S+) (.*)$", "\n".join(said("RUN")), re.MULTILINE)
    assert [step.split()[0] for _, step in steps] == ["pins", "longhaul"]
    for script, step in steps:
        arguments = step.replace("/wheels", str(nothing)).split()
        done = run("bash", tree / script, *arguments, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in site.glob("torch-*")} == {
        f"torch-{RIGHT_IMAGE['torch']}.dist-info"
    }
    health = run(python, "-m", "slurm.container.versions", "health")
    assert (health.returncode, health.stderr) == (0, "")
