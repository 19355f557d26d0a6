# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's extension where a CUDA toolkit is and no device answers."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from data.cuda_extension import (
    ARCHITECTURES,
    FOLDER,
    WITHOUT_DEVICE,
    architecture,
    during_import,
    prepare_process,
)
from longhaul.terminal.console import loading
from slurm.local_executor import local_executor
from tests.house.rooms import TREE


@pytest.fixture
def variables(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv(ARCHITECTURES, raising=False)
    return monkeypatch


def test_torch_can_say_what_to_compile_for_without_a_device(variables):
    with pytest.raises(IndexError):
        cpp_extension._get_cuda_arch_flags()
    variables.setenv(ARCHITECTURES, "")  # for torch as if it were not set; taken back at the end
    prepare_process()
    assert any(
        WITHOUT_DEVICE.replace(".", "") in flag for flag in cpp_extension._get_cuda_arch_flags()
    )


LOCKED = """
import os, sys
from pathlib import Path
from torch.utils import cpp_extension
folder = Path(cpp_extension._get_build_directory("managed_alloc_runtime", False))
(folder / "lock").touch()  # as a process leaves it that is killed while it compiles
{before}
import megatron.core.inference.unified_memory as found
assert not found.has_unified_memory
assert [path.name for path in folder.iterdir()] == ["lock"]
"""


@pytest.mark.parametrize(
    "before",
    [
        "from data.cuda_extension import prepare_process; prepare_process()",
        pytest.param(
            "from longhaul.terminal.console import loading; part = loading('it'); part.__enter__()",
            marks=pytest.mark.nightly,
        ),
        pytest.param("import data.without_cuda_extension", marks=pytest.mark.nightly),
    ],
)
def test_the_lock_of_a_killed_process_is_not_waited_for(before, tmp_path):
    environment = os.environ | {FOLDER: str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOCKED.format(before=before)],
        env=environment, cwd=TREE, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0


def test_other_extensions_are_compiled_as_ever(monkeypatch):
    asked = []
    monkeypatch.setattr(cpp_extension, "load_inline", lambda name, **_: asked.append(name))
    with during_import():
        cpp_extension.load_inline("another", cpp_sources="")
        with pytest.raises(RuntimeError, match="managed_alloc_runtime is left out"):
            cpp_extension.load_inline(name="managed_alloc_runtime", cpp_sources="")
    cpp_extension.load_inline("managed_alloc_runtime")
    assert asked == ["another", "managed_alloc_runtime"]


def test_what_the_user_names_stays(variables):
    variables.setenv(ARCHITECTURES, "8.0")
    prepare_process()
    assert "sm_80" in str(cpp_extension._get_cuda_arch_flags())


def test_where_a_device_answers_torch_asks_it(variables, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    prepare_process()
    assert ARCHITECTURES not in os.environ


@pytest.mark.parametrize("named", [None, "", "native", "8.0"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_is_submitted_after_loading_has_what_the_user_named(variables, named, fails):
    if named is not None:
        variables.setenv(ARCHITECTURES, named)
    said = pytest.raises(ValueError, match="stop") if fails else nullcontext()
    with said, loading("libraries"):
        assert os.environ[ARCHITECTURES] == ("8.0" if named == "8.0" else WITHOUT_DEVICE)
        if fails:
            raise ValueError("stop")
    inherited = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in inherited.splitlines() if line.startswith(f"{ARCHITECTURES}=")]
    assert lines == ([] if named is None else [f"{ARCHITECTURES}={named}"])


@pytest.mark.parametrize(("devices", "named"), [(0, WITHOUT_DEVICE), (1, None)])
def test_ranks_of_this_machine_have_the_guess_where_it_has_no_device(
    variables, monkeypatch, devices, named
):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)  # torchrun, as the command line finds it
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with loading("libraries"):
        pass
    ranks = os.environ | local_executor(2).env_vars
    assert ranks.get(ARCHITECTURES) == named


def test_ranks_that_are_described_during_an_import_get_the_guess_too(monkeypatch):
    monkeypatch.delenv(ARCHITECTURES, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with during_import():
        with during_import():
            assert architecture() == {ARCHITECTURES: WITHOUT_DEVICE}
        assert architecture() == {ARCHITECTURES: WITHOUT_DEVICE}
    assert ARCHITECTURES not in os.environ
    monkeypatch.setenv(ARCHITECTURES, "8.0")
    with during_import():
        assert architecture() == {}
    assert os.environ[ARCHITECTURES] == "8.0"
