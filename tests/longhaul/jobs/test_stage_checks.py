# SPDX-License-Identifier: Apache-2.0
"""Checks of a stage against the machine that it is started on."""

from types import SimpleNamespace

import pytest
import torch

from longhaul.jobs import stage_checks
from recipes.resolved.stage import ResolvedStage
from recipes.shipped.table import ROWS
from recipes.spec.units import GiB

NAME = "llama32_1b_nemo_16k"


@pytest.mark.parametrize(("gib", "noted"), [(22.0, True), (79.2, False), (141.0, False)])
def test_a_gpu_that_is_smaller_than_the_planned_one_is_noted(monkeypatch, gib, noted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=int(gib * GiB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    row = ROWS[NAME]
    said = list(stage_checks.smaller_gpu(ResolvedStage.of(row()), row))
    assert bool(said) == noted
    assert all("GPU has 22.0 GiB" in words and "--cluster" in words for words in said)
    tiny = ROWS["tiny_512"]
    assert list(stage_checks.smaller_gpu(ResolvedStage.of(tiny()), tiny)) == []
