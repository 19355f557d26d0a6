# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of ignored rotations plants, and which answers it accepts.

`tests/runs/test_rotation_in_effect.py` trains with such faults.
"""

import subprocess
import sys

import pytest

from benchmarks.reliability.ignored_rotation import METHODS, VARIABLE, Row, used, wrong
from custom_modules.rope.rotary import stated_rotation
from tests.house.rooms import TREE

REFUSED = Row("yarn", "factor 8 for 16", 1, 0, 0, 9.0, "it does not rotate by yarn, ...")
TAMPERED = "c was trained with another rotation than its stage configures: ..."


@pytest.mark.parametrize("method", METHODS)
def test_every_planted_rotation_differs_from_the_configured_one(method):
    own, other = (stated_rotation(rope, 32, 512) for rope in (METHODS[method], used(method)))
    assert other.difference(own)


def test_a_row_is_right_only_if_it_is_refused_before_a_second_step():
    assert not wrong(REFUSED)
    assert not wrong(REFUSED._replace(steps=1))
    for change in ({"code": 0}, {"steps": 2}, {"checkpoints": 1}, {"message": "out of memory"}):
        assert wrong(REFUSED._replace(**change)), change
    export = Row("export", "factor 8 recorded for 16", 2, 0, 0, 9.0, TAMPERED)
    assert not wrong(export)
    assert wrong(export._replace(code=0))
    assert not wrong(export._replace(fault="unchanged", code=0))
    assert wrong(export._replace(fault="unchanged", code=2))


PROBE = """
import torch
from benchmarks.reliability.ignored_rotation import METHODS, plant
plant()
from custom_modules.rope.rotary import Rotation
print(Rotation(METHODS["yarn"], 32).table(torch.tensor([[0]]), 512)[0].max().item())
"""


@pytest.mark.parametrize(("rank", "temperature"), [("0", 1.27726), ("1", 1.20794)])
def test_tables_are_planted_on_the_second_rank_alone(rank, temperature):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE],
        env={"RANK": rank, VARIABLE: "tables", "PYTHONPATH": str(TREE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) == pytest.approx(temperature, abs=1e-5)
