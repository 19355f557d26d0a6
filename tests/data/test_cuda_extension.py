# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's extension where a CUDA toolkit is and no device answers."""

import os

import pytest
import torch
from torch.utils import cpp_extension

from data.cuda_extension import ARCHITECTURES, WITHOUT_DEVICE, architecture_named, name_architecture


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


def test_the_name_is_taken_back(variables):
    with architecture_named():
        assert os.environ[ARCHITECTURES] == WITHOUT_DEVICE
    assert ARCHITECTURES not in os.environ
