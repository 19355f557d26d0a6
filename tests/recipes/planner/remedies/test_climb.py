# SPDX-License-Identifier: Apache-2.0
"""Remedies for a stage that runs out of memory, held to hand-counted bytes and constraints."""

from dataclasses import replace

import pytest

from recipes.notation.layout import layout_from
from recipes.planner.feasibility import violations
from recipes.planner.plan import Plan, plan
from recipes.planner.rank_groups import rank_map
from recipes.planner.remedies.climb import UNTRIED, Remedy, remedies
from recipes.planner.remedies.overrides import override_words
from recipes.planner.remedies.proposals import REMEDIES
from recipes.planner.workload import Workload
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.units import GiB

H100, A100 = cluster.load("dgx_h100"), cluster.load("dgx_a100")
H100_HALF = replace(H100, gpu=replace(H100.gpu, memory_gib=40))
ROW = ROWS["llama3_8b_nemo_64k"]


def workload(words: str, row=ROW) -> Workload:
    return Workload(
        card=row.card,
        seq_length=row.seq_length,
        tokens_per_batch=row.stage.tokens_per_batch,
        layout=layout_from(words),
        gpus_per_node=8,
    )


def planned(words: str, machine=H100, row=ROW) -> Plan:
    return plan(workload(words, row), machine)


def ladder(start: Plan) -> dict[str, Remedy]:
    return {one.name: one for one in remedies(start).ladder}


def test_a_tiled_loss_saves_the_logits_but_for_a_tile_and_the_weight_gradients_sum():
    start = planned("tp2 dp4")
    alone = ladder(start)["tiled loss"].alone
    vocab, hidden, tokens = 128_256 // 2, 4096, 64 * 1024
    logits = tokens * vocab * 6 + tokens * hidden * 2  # bf16 and fp32; the gathered input
    tile = vocab * hidden * 6 + 4096 * (vocab + 2 * hidden) * 2
    # The peak moves from the loss to the MLP, so that it falls by less.
    loss = start.memory.categories["loss"]
    assert loss - 3 * tokens / 2 * hidden * 2 == pytest.approx(logits)
    assert alone.workload.layout.tiling.loss
    assert 0 < start.memory.total - alone.memory.total <= logits - tile


def test_what_fits_has_a_cure_without_remedies():
    start = planned("tp2 head_chunked4 tile-loss")
    assert start.fits
    found = remedies(start)
    assert found.cure.names == ()
    assert found.cure.words == ()
    assert not any(one.together for one in found.ladder)


def test_without_any_of_its_remedies_the_cure_does_not_fit_or_only_holds_more():
    start = planned("tp2 ulysses4", machine=H100_HALF)
    cure = remedies(start).cure
    assert not start.fits
    assert cure.plan.fits
    assert len(cure.names) > 1
    for name in cure.names:
        others = [other for other in cure.names if other != name]
        here = start.workload
        for other in others:
            here = REMEDIES[other](here, H100_HALF)[0]
        without = plan(here, H100_HALF)
        same_time = without.time.step == pytest.approx(cure.plan.time.step, rel=1e-2)
        assert not without.fits or (same_time and without.memory.total > cure.plan.memory.total)


def test_a_remedy_that_costs_no_time_stays_in_the_cure_and_one_that_another_contains_does_not():
    cure = remedies(planned("ulysses8", row=ROWS["llama31_8b_ultralong_1m"])).cure
    assert {"tiled loss", "tiled MLP", "offload both"} <= set(cure.names)
    assert "offload inputs" not in cure.names
    assert "recompute full" not in cure.names


def test_full_recompute_is_not_paid_for_where_offload_would_do():
    row = ROWS["llama31_8b_ultralong_1m"]
    start = planned("ulysses8", row=row)
    cure = remedies(start).cure
    assert cure.plan.fits
    assert cure.plan.workload.layout.recompute.kind == "kept_attention"
    assert cure.plan.time.step < 1.05 * start.time.step


@pytest.mark.parametrize("words", ["ulysses8", "tp2 ulysses4", "hybrid2x4", "tp2 dp4"])
def test_what_nobody_has_tried_is_no_cure_where_a_tried_remedy_fits_these_gpus(words):
    cure = remedies(planned(words, machine=H100_HALF)).cure
    assert cure.plan.fits
    assert cure.plan.gpus == 8
    assert not UNTRIED & {*cure.names}


def test_remedies_without_more_groups_of_ranks_have_no_more():
    start = planned("ulysses8 kept_attention tile-loss")

    def groups(**options) -> set[int]:
        found = remedies(start, unexplained=16 * GiB, **options)
        plans = [one.alone for one in found.ladder if one.alone] + [found.cure.plan]
        return {len(rank_map(plan.workload, H100)) for plan in plans}

    assert max(groups()) == 2
    assert groups(more_groups=False) == {1}


def test_what_nobody_has_tried_is_climbed_where_nothing_else_fits_these_gpus():
    start = planned("tp8", row=ROWS["llama3_70b_nemo_128k"])
    cure = remedies(start).cure
    assert UNTRIED & {*cure.names}
    assert cure.plan.fits
    assert (cure.plan.gpus, cure.plan.workload.seq_length) == (8, start.workload.seq_length)


def test_bytes_that_only_a_log_shows_make_a_fitting_layout_lack_memory():
    start = planned("tp2 head_chunked4 tile-loss")
    unexplained = -start.short + 2 * GiB
    cure = remedies(start, unexplained=unexplained).cure
    assert cure.names
    assert cure.plan.short + unexplained <= 0


def test_together_is_never_above_what_the_remedy_before_left():
    start = planned("ulysses8", row=ROWS["llama31_8b_ultralong_1m"])
    totals = [one.together.memory.total for one in remedies(start).ladder if one.together]
    assert len(totals) > 2
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("words", ["tp2 dp4 mb2", "ulysses8", "ring4 pp2", "hybrid2x2 dp2 full"])
def test_no_remedy_breaks_a_law(words):
    for remedy in remedies(planned(words)).ladder:
        for one in (remedy.alone, remedy.together):
            assert one is None or not list(violations(one.workload, H100)), remedy.name


@pytest.mark.parametrize(
    ("words", "machine", "name", "why"),
    [
        ("tp2 dp4", H100, "smaller micro-batch", "one sequence"),
        ("tp2 dp4 tile-loss", H100, "tiled loss", "already tiled"),
        ("tp2 dp4 full", H100, "recompute kept_attention", "keeps less"),
        ("tp8", H100, "more TP", "fills the fast link"),
        ("tp2 ulysses4", H100, "more CP", "more GPUs"),
        ("ring8", H100, "fewer heads at a time", "no all-to-all"),
        ("pp8", H100, "sharded parameters", "no rank to shard it over"),
        ("pp2 dp4", H100, "sharded parameters", "PP is 2"),
        ("tp2 dp4 zero3", H100, "Adam on the host", "take sharding optimizer"),
        ("tp2 dp4", A100, "FP8", "has no FP8"),
    ],
)
def test_a_remedy_that_is_not_possible_says_why(words, machine, name, why):
    remedy = ladder(planned(words, machine))[name]
    assert remedy.alone is None
    assert why in remedy.why_not


def test_experts_are_neither_tiled_nor_in_fp8():
    row = ROWS["mixtral_8x7b_nemo_64k"]
    found = ladder(planned("tp2 ulysses2 pp4 dp1", row=row))
    assert "experts" in found["tiled MLP"].why_not
    assert "experts" in found["FP8"].why_not


def test_offload_brings_the_recompute_whose_tensors_it_moves():
    found = ladder(planned("tp2 dp4"))["offload both"]
    assert found.alone.workload.layout.recompute.kind == "kept_attention"
    assert "model.config.recompute.kind=kept_attention" in found.words
    assert any(word.startswith("model.config.offload.cap_gib=16.") for word in found.words)


def test_what_does_not_fit_at_all_has_no_cure():
    row = ROWS["llama31_405b_llama31_128k"]
    small = replace(H100, gpu=replace(H100.gpu, memory_gib=2))
    assert remedies(plan(workload("tp8", row), small)).cure is None


def test_words_of_the_same_job_are_none():
    assert override_words(workload("tp2 dp4"), workload("tp2 dp4")) == []


def test_words_divide_experts_and_join_them_again():
    row = ROWS["mixtral_8x7b_nemo_16k"]
    whole, divided = workload("tp2 dp8", row), workload("tp2 dp8 ep8 etp1", row)
    key = "trainer.strategy.expert"
    assert override_words(whole, divided) == [
        f"{key}_model_parallel_size=8", f"{key}_tensor_parallel_size=1",
    ]  # fmt: skip
    assert override_words(divided, whole) == [
        f"{key}_model_parallel_size=1", f"{key}_tensor_parallel_size=null",
    ]  # fmt: skip


def test_words_say_each_thing_that_differs():
    words = override_words(
        workload("tp2 dp4 mb2"), workload("tp4 hybrid2x2 dp2 full tile-mlp zero0")
    )
    assert words == [
        "trainer.strategy.tensor_model_parallel_size=4",
        "trainer.strategy.context_parallel_size=4",
        "trainer.num_nodes=4",
        "data.micro_batch_size=1",
        "model.config.cp.kind=hybrid",
        "model.config.cp.ulysses=2",
        "model.config.recompute.kind=full",
        "model.config.tiling.mlp=true",
        "trainer.strategy.ddp.use_distributed_optimizer=false",
        "trainer.strategy.ddp.overlap_param_gather=false",
        "optim.config.use_distributed_optimizer=false",
    ]
