# SPDX-License-Identifier: Apache-2.0
"""Remedies for a stage that runs out of memory, held to hand-counted bytes and constraints."""

from dataclasses import replace

import pytest

from recipes.notation.layout import layout_from
from recipes.planner.feasibility import violations
from recipes.planner.overrides import override_words
from recipes.planner.plan import Plan, plan
from recipes.planner.rank_groups import rank_map
from recipes.planner.remedies import UNTRIED, remedy
from recipes.planner.workload import Workload
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.units import GiB, M

H100 = cluster.load("dgx_h100")
H100_HALF = replace(H100, gpu=replace(H100.gpu, memory_gib=40))
ROW = ROWS["llama3_8b_nemo_64k"]
LONGER, MILLION = ROWS["llama3_8b_nemo_128k"], ROWS["llama31_8b_ultralong_1m"]


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


def with_memory(gib: float, host: float = H100.host_memory_gib) -> cluster.Cluster:
    return replace(H100, gpu=replace(H100.gpu, memory_gib=gib), host_memory_gib=host)


def test_a_tiled_loss_saves_the_logits_but_for_a_tile_and_the_weight_gradients_sum():
    start = planned("tp2 dp4")
    first = remedy(start).changes[0]
    assert first.name == "tiled loss"
    vocab, hidden, tokens = 128_256 // 2, 4096, 64 * 1024
    logits = tokens * vocab * 6 + tokens * hidden * 2  # bf16 and fp32; the gathered input
    tile = vocab * hidden * 6 + 4096 * (vocab + 2 * hidden) * 2
    # The peak moves from the loss to the MLP, so that it falls by less.
    loss = start.memory.categories["loss"]
    assert loss - 3 * tokens / 2 * hidden * 2 == pytest.approx(logits)
    assert first.together.workload.layout.tiling.loss
    assert 0 < start.memory.total - first.together.memory.total <= logits - tile


def test_what_fits_has_nothing_to_change():
    start = planned("tp2 head_chunked4 tile-loss")
    found = remedy(start)
    assert start.fits
    assert (found.plan, found.changes) == (start, ())


SIXTEEN_MILLION = replace(
    workload("head_chunked1 tile-loss", ROWS["llama32_1b_nemo_64k"]),
    seq_length=16 * M,
    tokens_per_batch=16 * M,
)


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (planned("dp8 kept_attention tile-loss", row=LONGER), "offload both"),
        (planned("dp8 mb4 tile-loss", row=ROWS["llama32_1b_nemo_64k"]), "smaller micro-batch"),
        (planned("ulysses8", row=MILLION), "recompute kept_attention"),
        (planned("dp8 full tile-loss tile-mlp", with_memory(80, 1), LONGER), "more CP"),
        (planned("tp8", row=ROWS["llama3_70b_nemo_128k"]), "Adam on the host"),
        (planned("tp8", row=ROWS["llama31_405b_llama31_128k"]), "more GPUs"),
        (plan(SIXTEEN_MILLION, with_memory(40, 1)), "shorter stage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_of_change_is_found_where_it_is_needed(start, named):
    found = remedy(start)
    assert named in found.names
    assert found.plan.fits
    assert list(violations(found.plan.workload, start.cluster)) == []
    assert found.changes[-1].together == found.plan
    if named not in ("more GPUs", "shorter stage"):
        assert found.plan.gpus == start.gpus
        assert found.plan.workload.seq_length == start.workload.seq_length


def test_full_recompute_is_not_paid_for_where_offload_would_do():
    start = planned("ulysses8", row=MILLION)
    found = remedy(start)
    assert found.names == ("tiled loss", "tiled MLP", "recompute kept_attention", "offload both")
    assert found.plan.time.step < 1.05 * start.time.step


@pytest.mark.parametrize("words", ["ulysses8", "tp2 ulysses4", "hybrid2x4", "tp2 dp4"])
def test_what_nobody_has_tried_is_no_remedy_where_a_tried_one_fits_these_gpus(words):
    found = remedy(planned(words, machine=H100_HALF))
    assert found.plan.fits
    assert found.plan.gpus == 8
    assert not UNTRIED & {*found.names}


def test_remedies_without_more_groups_of_ranks_have_no_more():
    start = planned("ulysses8 kept_attention tile-loss")

    def groups(**options) -> int:
        found = remedy(start, unexplained=-start.short + 16 * GiB, **options)
        assert found.changes
        return len(rank_map(found.plan.workload, H100))

    assert groups(more_groups=False) == 1
    assert len(rank_map(start.workload, H100)) == 1


def test_bytes_that_only_a_log_shows_make_a_fitting_layout_lack_memory():
    start = planned("tp2 head_chunked4 tile-loss")
    unexplained = -start.short + 2 * GiB
    found = remedy(start, unexplained=unexplained)
    assert found.changes
    assert found.plan.short + unexplained <= 0


def test_what_does_not_fit_at_all_has_no_remedy():
    row = ROWS["llama31_405b_llama31_128k"]
    assert remedy(planned("tp8", with_memory(2), row)) is None


@pytest.mark.parametrize("words", ["tp2 dp4 mb2", "ulysses8", "ring4 pp2", "hybrid2x2 dp2"])
def test_the_overrides_of_the_changes_are_those_of_the_whole_remedy(words):
    start = planned(words)
    found = remedy(start)
    stated = {}
    for change in found.changes:
        stated |= dict(word.split("=", 1) for word in change.words)
    whole = dict(word.split("=", 1) for word in override_words(start.workload, found.plan.workload))
    assert {key: stated[key] for key in whole} == whole
