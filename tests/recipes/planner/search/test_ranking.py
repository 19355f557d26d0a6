# SPDX-License-Identifier: Apache-2.0
"""The chosen plan fits, violates no constraint, and is no worse than other plans."""

from dataclasses import replace

import pytest

from recipes.models import CARDS
from recipes.planner.batch_size import even_batch
from recipes.planner.feasibility import violations
from recipes.planner.plan import HEADROOM, plan
from recipes.planner.rank_groups import rank_map
from recipes.planner.search.alternatives import NoLayoutError, best, why_not
from recipes.planner.search.parallel_sizes import LARGEST_CLUSTER, divisors
from recipes.planner.search.ranking import LEANER as LEAN
from recipes.planner.search.ranking import TOLERANCE, search
from recipes.planner.search.request import of_stage
from recipes.shipped import regenerate
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.layout import Fp8
from recipes.spec.stage import Cosine, Stage
from recipes.spec.units import K, M
from tests.recipes.planner.search.questions import H100, question
from tests.recipes.support.chosen_rows import chosen, family_and_layout

CASES = {
    "1M on 32": question(),
    "1M on 1,024": question(gpus=1024),
    "16K on 64": question(seq_length=16 * K, gpus=64),
    "70B at 128K": question(card=CARDS["llama3_70b"], seq_length=128 * K, gpus=64),
    "experts at 64K": question(card=CARDS["mixtral_8x7b"], seq_length=64 * K, gpus=64),
    "FP8 at 64K": question(seq_length=64 * K, gpus=8, fp8=Fp8(recipe="tensorwise")),
    "a rack": question(cluster=cluster.load("gb200_nvl72"), gpus=64),
}


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_what_is_chosen_fits_and_violates_no_constraint(asked):
    answer = search(asked)
    assert answer.plans
    for found in answer.plans:
        workload, layout = found.workload, found.workload.layout
        assert layout.world_size == asked.gpus
        assert found.memory.total <= (1 - HEADROOM) * asked.cluster.gpu_bytes
        assert not list(violations(workload, asked.cluster))
        assert found.memory.host <= layout.offload.cap_gib * 2**30
        assert workload.micro_batches * layout.dp * layout.micro_batch * asked.seq_length == (
            asked.tokens_per_batch
        )


def test_the_fastest_comes_first():
    for asked in (question(), question(card=CARDS["tiny"], seq_length=8 * K, gpus=8)):
        steps = [found.time.step for found in search(asked, tightest=True).plans]
        assert steps == pytest.approx(sorted(steps), rel=1e-3)


LEANER = {
    "8B at 512K": question(seq_length=512 * K, gpus=8),
    "8B at 1M": question(gpus=64),
    "1B at 64K": question(card=CARDS["llama32_1b"], seq_length=64 * K, gpus=8),
}


@pytest.mark.parametrize("asked", LEANER.values(), ids=LEANER)
def test_a_leaner_layout_is_chosen_where_it_takes_about_as_long(asked):
    fastest, chosen = search(asked, tightest=True).plans[0], search(asked).plans[0]
    assert chosen.memory.total <= (1 - LEAN) * fastest.memory.total
    assert chosen.memory.host <= fastest.memory.host
    assert fastest.time.step < chosen.time.step <= (1 + TOLERANCE) * fastest.time.step
    assert fastest in search(asked).plans


def test_host_memory_is_not_taken_where_it_saves_no_time():
    """Offload that compute hides takes no time either."""
    row = ROWS["mixtral_8x22b_nemo_16k"]
    gpus = row.layout.world_size
    found = search(of_stage(row.card, row.stage, H100, gpus=gpus, fp8=Fp8())).automatic
    assert found.memory.host == 0


def test_more_gpus_take_a_step_faster():
    few, many = (search(question(gpus=gpus)).plans[0].time.step for gpus in (32, 128))
    assert many < few


def test_the_best_of_a_stage_is_the_fastest_without_untried_parts():
    stage = Stage(
        seq_length=64 * K, rope="native", tokens=4 * M, tokens_per_batch=4 * M,
        lr=Cosine(peak=1e-5), start="card",
    )  # fmt: skip
    found = best(CARDS["llama31_8b"], stage, H100, gpus=8)
    answer = search(question(seq_length=64 * K, gpus=8))
    assert found == answer.automatic
    assert not found.untried
    with pytest.raises(NoLayoutError, match=r"no layout of llama31_405b .* lacks .* GiB"):
        best(CARDS["llama31_405b"], stage, H100, gpus=8)


def test_nodes_that_are_no_power_of_two_share_a_batch_that_they_divide():
    batch = even_batch(4 * M, 64 * K, 24)
    assert batch == 60 * 64 * K
    found = search(question(seq_length=64 * K, tokens_per_batch=batch, gpus=24)).plans[0]
    assert found.workload.layout.dp % 3 == 0


def test_what_a_constraint_refuses_is_not_chosen_and_is_counted():
    asked = question(
        seq_length=100_000, tokens_per_batch=100_000, gpus=8, fp8=Fp8(recipe="tensorwise")
    )
    answer = search(asked)
    assert any("needs multiples of 16" in why for why in answer.ruled_out)
    experts = question(
        card=CARDS["mixtral_8x7b"], seq_length=64 * K, gpus=64, fp8=Fp8(recipe="tensorwise")
    )
    answer = search(experts)
    assert not answer.plans
    assert "has experts, which support neither a tiled MLP" in why_not(experts, answer)


def test_a_batch_of_no_whole_number_of_sequences_is_refused():
    with pytest.raises(ValueError, match="not a whole number of sequences"):
        search(question(tokens_per_batch=M + K))


@pytest.mark.parametrize("number", [1, 12, 97, 1024, 5040])
def test_divisors_are_those_that_leave_no_rest(number):
    assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]


def test_more_gpus_than_any_cluster_has_are_refused():
    with pytest.raises(ValueError, match="1,048,577 GPUs; layouts are planned for at most"):
        search(question(gpus=LARGEST_CLUSTER + 1))


PLANNED = [row for row in ROWS.values() if row.planned]


@pytest.mark.parametrize("name", chosen(family_and_layout, PLANNED))
def test_a_shipped_row_has_the_fewest_nodes_and_is_among_the_fastest(name):
    row = ROWS[name]
    nodes, best = regenerate.laid_out(row)
    machine = cluster.load(row.cluster)
    shipped = plan(
        of_stage(row.card, row.stage, machine, gpus=1, fp8=Fp8()).workload(row.layout), machine
    )
    assert row.nodes == nodes
    assert row.layout.world_size == nodes * machine.gpus_per_node
    assert shipped.fits
    assert shipped.time.step <= 1.02 * best.time.step
    assert (
        regenerate.days(row, shipped) <= 1.02 * regenerate.DAYS or 2 * nodes > regenerate.MOST_NODES
    )


OTHERS = [name for name, row in ROWS.items() if row.layout.device == "cuda" and not row.planned]


@pytest.mark.parametrize("name", OTHERS)
def test_a_row_that_is_not_the_planner_s_fits(name):
    row = ROWS[name]
    machine = cluster.load(row.cluster)
    asked = of_stage(row.card, row.stage, machine, gpus=row.layout.world_size, fp8=Fp8())
    assert asked.plan(row.layout).fits


def test_ranks_are_numbered_tp_first_and_the_fast_link_is_known():
    layout = ROWS["llama31_8b_ultralong_4m"].layout
    asked = question(seq_length=4 * M, tokens_per_batch=8 * M, gpus=16)
    groups = {group.kind: group for group in rank_map(asked.workload(layout), H100)}
    assert groups["TP"].ranks == [0, 1]
    assert groups["CP all-to-all"].ranks == [0, 2, 4, 6]
    assert groups["CP ring"].ranks == [0, 8]
    assert [groups[kind].inside for kind in groups] == [True, True, False]


def test_an_interleaved_pipeline_is_offered_where_it_is_faster_and_never_taken_unasked():
    asked = question(
        card=CARDS["llama31_405b"], seq_length=8 * K, tokens_per_batch=M,
        cluster=cluster.load("dgx_h200"), gpus=512,
    )  # fmt: skip
    answer = search(asked)
    offered = next(one for one in answer.plans if one.workload.layout.vpp > 1)
    assert "an interleaved pipeline" in offered.untried
    plain = asked.plan(replace(offered.workload.layout, vpp=1))
    assert offered.time.step < plain.time.step / 1.02
    assert offered.memory.total > plain.memory.total
    assert answer.automatic.workload.layout.vpp == 1
