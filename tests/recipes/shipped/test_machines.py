# SPDX-License-Identifier: Apache-2.0
"""Machines and layouts that a user asks for, by nodes, GPUs and words."""

from dataclasses import replace

import pytest

from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.notation.layout import words_of
from recipes.shipped.machines import BY_LAYOUT, SCALED, Machines, gpus_of, on_machines
from recipes.shipped.select import placed_row, short
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.layout import Fp8

ROW = ROWS["llama31_8b_nemo_64k"]
H100 = cluster.load("dgx_h100")


def placed(**asked):
    return placed_row(CARDS["llama32_1b"], LADDERS["nemo"], LADDERS["nemo"].stages[1],
                      Machines(**asked))  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "gpus", "found"),
    [(None, None, 8), (2, None, 16), (None, 3, 3), (None, 24, 24), (2, 16, 16)],
)
def test_nodes_are_whole_and_gpus_are_a_part_of_one_or_whole_ones(nodes, gpus, found):
    assert gpus_of(H100, nodes, gpus) == found


@pytest.mark.parametrize(
    ("nodes", "gpus", "said"),
    [
        (0, None, "--nodes is 0; it must be at least 1"),
        (None, -1, "--gpus is -1; it must be at least 1"),
        (None, 12, "--gpus is 12, not a whole number of nodes of 8; take 8"),
        (2, 8, "--gpus is 8, and 2 nodes of dgx_h100 have 16"),
    ],
)
def test_machines_that_are_not_there_are_refused(nodes, gpus, said):
    with pytest.raises(ValueError, match=r"--nodes|--gpus") as told:
        gpus_of(H100, nodes, gpus)
    assert said in str(told.value)


def test_one_gpu_needs_no_cluster_file():
    row = placed(gpus=1)
    assert (row.nodes, row.layout.world_size, row.cluster) == (1, 1, "dgx_h100")
    assert row.source == "planned for 1 GPU of dgx_h100"


def test_a_layout_in_words_is_taken_as_it_is():
    row = placed(layout="tp2 ulysses2 dp4 tile-loss")
    assert words_of(row.layout) == "tp2 ulysses2 dp4 tile-loss"
    assert (row.nodes, row.pinned) == (2, BY_LAYOUT)


def test_a_layout_for_cpu_ranks_is_in_fp32_and_on_no_cluster():
    for asked in ({"layout": "ulysses2 cpu"}, {"layout": "ulysses2", "device": "cpu"}):
        row = placed(**asked)
        assert (row.layout.device, row.layout.precision, row.cluster) == ("cpu", "fp32", "local")
    assert placed(layout="ulysses2 cpu", nodes=2).nodes == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layout": "tp2", "gpus": 8}, "'tp2' has 2 ranks and --gpus is 8, 8 GPUs; set dp4"),
        ({"layout": "tp2 dp4", "nodes": 2}, "has 8 ranks and --nodes is 2, 16 GPUs; set dp8"),
        (
            {"layout": "ulysses4 dp8", "gpus": 6},
            "32 ranks and --gpus is 6, 6 GPUs; leave the number out",
        ),
        ({"layout": "tp3"}, "llama32_1b_nemo_64k under the layout 'tp3': "),
        ({"layout": "tp2 dp6"}, "12 ranks are not a whole number of nodes of 8"),
        ({"layout": "tp2 what"}, "'what' is not a layout setting"),
        ({"layout": "tp3 cpu"}, "over CP 1 is not divisible by TP 3, which"),
        ({"layout": "ring7 cpu"}, "is not divisible by 2 x CP = 14"),
        ({"layout": "ring3 cpu", "nodes": 2}, "has 3 ranks, and 2 nodes cannot share them"),
    ],
    ids=str,
)
def test_a_layout_that_cannot_train_the_stage_is_refused(asked, said):
    with pytest.raises(ValueError, match=r"layout|nodes") as told:
        placed(**asked)
    assert said in str(told.value)


def test_a_shipped_recipe_keeps_its_layout_on_more_gpus():
    more = on_machines(ROW, Machines(nodes=4))
    assert (more.nodes, more.layout) == (4, replace(ROW.layout, dp=4))
    assert on_machines(ROW, Machines(layout="tp2 ulysses4")).pinned == BY_LAYOUT
    other = on_machines(ROW, Machines(cluster="gb200_nvl72"))
    assert (other.nodes, other.layout.world_size) == (2, ROW.layout.world_size)
    assert not list(short(other))


def test_a_shipped_recipe_says_that_its_layout_does_not_fit_another_cluster():
    small = on_machines(ROWS["llama31_8b_nemo_16k"], Machines(cluster="rtx_4090"))
    (said,) = short(small)
    assert said.endswith("lacks 48.0 GiB of GPU memory on rtx_4090")


def test_a_shipped_recipe_says_that_its_replicas_are_others():
    assert on_machines(ROW, Machines(nodes=4)).pinned == SCALED
    with pytest.raises(ValueError, match="under the layout"):
        on_machines(ROW, Machines(nodes=256))


def test_a_recipe_for_one_gpu_stays_as_it_is_on_one_and_has_replicas_on_more():
    alone = ROWS["llama31_8b_nemo_64k_on_1xh100"]
    assert on_machines(alone, Machines(gpus=1)) == alone
    two = on_machines(alone, Machines(gpus=2))
    assert (two.layout.dp, two.nodes, two.pinned) == (2, 1, SCALED)


def test_a_shipped_recipe_is_refused_on_a_part_of_a_replica():
    with pytest.raises(ValueError, match="takes 8 GPUs a replica") as told:
        on_machines(ROW, Machines(gpus=4))
    assert "name another layout by --layout" in str(told.value)


def test_a_recipe_in_fp8_stays_in_fp8_under_a_layout_in_words_that_does_not_state_it():
    row = ROWS["llama31_8b_nemo_128k_fp8"]
    words = "tp4 ulysses2 tile-loss tile-mlp"
    found = on_machines(row, Machines(layout=words))
    assert (found.name, found.layout.fp8) == (row.name, row.layout.fp8)
    assert words_of(found.layout) == f"{words} fp8:tensorwise"
    stated = on_machines(row, Machines(layout=f"{words} fp8:blockwise")).layout
    assert stated.fp8 == Fp8(recipe="blockwise")
    assert on_machines(row, Machines(layout=f"{words} cpu")).layout.fp8 == Fp8()


def test_cpu_ranks_are_shared_by_nodes_evenly():
    tiny = ROWS["tiny_8k"]
    assert on_machines(tiny, Machines(nodes=2)).nodes == 2
    with pytest.raises(ValueError, match="has 2 CPU ranks, which they cannot share evenly"):
        on_machines(tiny, Machines(nodes=3))
    with pytest.raises(ValueError, match="laid out for CPU ranks"):
        on_machines(tiny, Machines(gpus=1))
