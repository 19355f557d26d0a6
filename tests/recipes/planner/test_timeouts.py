# SPDX-License-Identifier: Apache-2.0
"""How long a job needs to end well, by hand."""

import pytest

from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.plan import plan
from recipes.planner.timeouts import limits
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.units import K, M

H100 = cluster.load("dgx_h100")


@pytest.mark.parametrize(("words", "bytes_each"), [("", 14), (" fp32", 12)])
def test_saving_takes_one_and_a_half_steps_the_checkpoint_and_a_minute(words, bytes_each):
    workload = Workload(
        card=CARDS["llama31_8b"], seq_length=128 * K, tokens_per_batch=4 * M,
        layout=layout_from(f"tp8 ulysses4 kept_attention{words}"), gpus_per_node=8,
    )  # fmt: skip
    found = plan(workload, H100)
    written = 8_030_261_248 * bytes_each / 1e9
    assert limits(found).stop == pytest.approx(1.5 * found.time.step + 60)
    assert limits(found).save == pytest.approx(limits(found).stop + written)
