# SPDX-License-Identifier: Apache-2.0
"""Faults of torch, the driver and Transformer Engine are each reported in one sentence."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from slurm.preflight.node import gpu_software
from slurm.preflight.requirements import Expected

WITHOUT_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
INCLUDE = sysconfig.get_paths()["include"]
EXTENSION = """
#include <Python.h>
extern void of_another_torch(void);
PyMODINIT_FUNC PyInit_transformer_engine_torch(void) { of_another_torch(); return NULL; }
"""


def asked(*words, **environ):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "slurm.preflight.node.gpu_software", *words],
        env=os.environ | environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def extension_of_another_torch(folder):
    """Compile an extension whose symbol no library has, and wrap it as the package does."""
    if shutil.which("cc") is None or not Path(INCLUDE, "Python.h").is_file():
        pytest.skip("there is no C compiler, or no headers of Python")
    package, metadata = folder / "transformer_engine", folder / "transformer_engine-2.9.0.dist-info"
    (package / "pytorch").mkdir(parents=True)
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 2.9.0\n")
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text("import transformer_engine_torch\n")
    source = folder / "extension.c"
    source.write_text(EXTENSION)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-z,now", f"-I{INCLUDE}",
         source, "-o", folder / "transformer_engine_torch.so"],
        check=True,
    )  # fmt: skip


def test_an_engine_compiled_against_another_torch_is_one_sentence(tmp_path):
    extension_of_another_torch(tmp_path)
    code, _, said = asked("loaded", PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    assert code == 2
    assert said.count("\n") == 1, said
    assert said.startswith(
        f"error: Transformer Engine 2.9.0 cannot be loaded with torch {torch.__version__}: it was "
        "compiled against another torch ("
    )
    assert "undefined symbol: of_another_torch" in said
    assert "`make gpu`" in said


def test_libraries_of_torch_s_packages_are_linked_once_to_where_they_are_looked_for(tmp_path):
    here = tmp_path / "nvidia" / "cu13" / "lib"
    here.mkdir(parents=True)
    for name in (
        "libnvrtc.so.13",
        "libnvrtc.alt.so.13",
        "libnvrtc-builtins.so.13.0",
        "libcurand.so.10",
        "libx.so.1",
    ):
        (here / name).write_text(name)
    there = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    there.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.9"):
        (there / name).symlink_to(tmp_path / "gone")
    made = gpu_software.link_libraries(tmp_path)
    assert [link.name for link in made] == [
        "libnvrtc-builtins.so.13.0", "libnvrtc.so.13", "libcurand.so.10",
    ]  # fmt: skip
    assert [link.read_text() for link in made] == [link.name for link in made]
    assert not list(there.glob("*.13.9"))
    assert gpu_software.link_libraries(tmp_path) == []
    assert gpu_software.link_libraries(tmp_path / "no CUDA") == []


def test_an_engine_that_is_not_installed_is_told_how_it_is():
    try:
        version(gpu_software.PACKAGE)
    except PackageNotFoundError:
        code, _, said = asked("loaded")
        assert (code, said.count("\n")) == (2, 1)
        assert "is not installed; `make gpu`" in said
    else:
        pytest.skip("Transformer Engine is installed")


@WITHOUT_CUDA
def test_a_torch_without_cuda_is_refused_before_anything_is_compiled():
    code, out, said = asked("build")
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert f"torch {torch.__version__} is a build without CUDA" in said
    assert "is a build without CUDA; install" in gpu_software.driver_fault(1)


@pytest.mark.parametrize(
    ("release", "toolkit", "said"),
    [
        ("12.8", None, "is built for CUDA 12.8, and the extra gpu brings"),
        ("13.0", None, "there is no CUDA toolkit (nvcc); install CUDA 13.0"),
        ("13.0", "release 12.4, V12.4.131", "says CUDA 12.4, and torch"),
        ("13.0", "what", "says no release, and torch"),
        ("13.0", "release 13.0, V13.0.48", ""),
    ],
    ids=["torch's CUDA", "no toolkit", "another toolkit", "no toolkit's answer", "all there"],
)
def test_a_machine_that_cannot_compile_is_told_what_it_lacks(
    monkeypatch, tmp_path, release, toolkit, said
):
    monkeypatch.setattr(torch.version, "cuda", release)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    which = shutil.which
    monkeypatch.setattr(  # a machine without a compiler has this one
        shutil, "which", lambda name, **given: "c++" if name == "c++" else which(name, **given)
    )
    if toolkit is not None:
        compiler = tmp_path / "bin" / "nvcc"
        compiler.parent.mkdir()
        compiler.write_text(f"#!/bin/sh\necho '{toolkit}'\n")
        compiler.chmod(0o755)
    found = gpu_software.build_fault()
    assert said in found
    assert bool(found) == bool(said)


def test_a_job_without_gpus_has_no_such_check():
    have = {"transformer-engine": "2.9.0"}.get
    assert not list(gpu_software.engine_checks(Expected(), have))
    assert not list(gpu_software.engine_checks(Expected(gpus_per_node=1), {}.get))


def test_a_fault_is_a_failed_check_with_its_remedy():
    expected, have = Expected(gpus_per_node=1), {"transformer-engine": "2.9.0"}.get
    (failed,) = gpu_software.engine_checks(expected, have, lambda: "it fails (a; b); do this")
    assert (failed.state, failed.said, failed.remedy) == ("failure", "it fails (a; b)", "do this")
    (passed,) = gpu_software.engine_checks(expected, have, lambda: "")
    assert passed.state == "ok"


def test_a_question_that_is_none_is_answered_with_the_questions():
    code, _, said = asked("what")
    assert code == 2
    assert "gpu_software loaded" in said
