# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's extension where a CUDA toolkit is and no device answers."""

import os
import subprocess
from contextlib import nullcontext

import pytest
import torch
from torch.utils import cpp_extension

from data.cuda_extension import (
    ARCHITECTURES,
    WITHOUT_DEVICE,
    architecture,
    architecture_named,
    name_architecture,
)
from longhaul.terminal.console import loading
from slurm.local_executor import local_executor


@pytest.fixture
def variables(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv(ARCHITECTURES, raising=False)
    return monkeypatch


def test_torch_can_say_what_to_compile_for_without_a_device(variables):
    with pytest.raises(IndexError):
        cpp_extension._get_cuda_arch_flags()
    variables.setenv(ARCHITECTURES, "")  # for torch as if it were not set; taken back at the end
    name_architecture()
    assert any(
        WITHOUT_DEVICE.replace(".", "") in flag for flag in cpp_extension._get_cuda_arch_flags()
    )


def test_what_the_user_names_stays(variables):
    variables.setenv(ARCHITECTURES, "8.0")
    name_architecture()
    assert "sm_80" in str(cpp_extension._get_cuda_arch_flags())


def test_where_a_device_answers_torch_asks_it(variables, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    name_architecture()
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with loading("libraries"):
        pass
    ranks = os.environ | local_executor(2).env_vars
    assert ranks.get(ARCHITECTURES) == named


def test_ranks_that_are_described_during_an_import_get_the_guess_too(monkeypatch):
    monkeypatch.delenv(ARCHITECTURES, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with architecture_named():
        with architecture_named():
            assert architecture() == {ARCHITECTURES: WITHOUT_DEVICE}
        assert architecture() == {ARCHITECTURES: WITHOUT_DEVICE}
    assert ARCHITECTURES not in os.environ
    monkeypatch.setenv(ARCHITECTURES, "8.0")
    with architecture_named():
        assert architecture() == {}
    assert os.environ[ARCHITECTURES] == "8.0"
