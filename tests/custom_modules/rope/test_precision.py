# SPDX-License-Identifier: Apache-2.0
"""The angle of a rotation at millions of positions, ours and Megatron-Core's, against mpmath."""

import pytest
import torch

from benchmarks.rope_precision import megatron, ours


@pytest.mark.parametrize("position", [0, 1, 2**20, 2**22, 2**24, 2**31 - 1])
def test_the_angle_is_exact_to_a_millionth_at_every_position(position):
    assert ours(position) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("position", [2**20, 2**22, 2**24])
def test_megatron_s_unfused_table_is_off_by_hundredths_of_a_radian(position, dtype):
    assert megatron(position, dtype) > 0.01
