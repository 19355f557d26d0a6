# SPDX-License-Identifier: Apache-2.0
"""Sizes of one rank: against the card's own count, and against sums written out."""

from dataclasses import replace

import pytest

from recipes.models import CARDS
from recipes.planner.workload import Workload
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.units import K, M


def workload(card="llama31_8b", *, seq=64 * K, batch=4 * M, **layout) -> Workload:
    return Workload(
        card=CARDS[card],
        seq_length=seq,
        tokens_per_batch=batch,
        layout=Layout(**layout),
        gpus_per_node=8,
    )


@pytest.mark.parametrize("card", CARDS)
def test_the_weights_of_one_rank_are_the_parameters_of_the_card(card):
    assert workload(card).weights(0) == CARDS[card].parameters


@pytest.mark.parametrize("card", [name for name in CARDS if CARDS[name].layers % 2 == 0])
def test_pipeline_stages_add_up_to_the_card_and_a_tied_embedding_is_on_both_ends(card):
    both = sum(workload(card, pp=2).weights(stage) for stage in (0, 1))
    twice = CARDS[card].vocab * CARDS[card].hidden if CARDS[card].tied_embeddings else 0
    assert both == CARDS[card].parameters + twice


@pytest.mark.parametrize("card", ["llama2_7b", "llama31_8b"])
def test_tensor_parallelism_divides_all_but_norms(card):
    facts = CARDS[card]
    norms = facts.hidden * (2 * facts.layers + 1)
    halved = (facts.parameters - norms) / 2 + norms
    assert workload(card, tp=2).weights(0) == halved


def test_rows_that_pad_the_vocabulary_are_counted():
    card = replace(CARDS["llama31_8b"], vocab=32_003)
    ours = replace(workload(tp=2), card=card)
    assert ours.vocabulary_rows == 32_256 / 2
    embedding_and_head = 2 * 32_256 / 2 * card.hidden
    whole = replace(workload(tp=2), card=replace(card, vocab=32_000))
    assert ours.weights(0) - whole.weights(0) == embedding_and_head - 32_000 * card.hidden


def test_the_sizes_of_a_rank_of_a_layout():
    ours = workload(tp=2, cp=ContextParallel.ulysses(4), pp=2, dp=4, micro_batch=2)
    assert ours.tokens == 2 * 16 * K
    assert ours.micro_batches == 8  # 4M tokens over 4 data ranks of 2 sequences of 64K
    assert ours.stages == (range(1, 17), range(17, 33))
    assert ours.replicas == 16
    shape = ours.attention
    assert (shape.heads, shape.kv_heads, shape.tokens, shape.batch) == (16, 4, 16 * K, 2)


def test_auto_becomes_the_kind_that_the_links_suggest():
    inside = workload(cp=ContextParallel.auto(8)).degrees
    across = workload(cp=ContextParallel.auto(16)).degrees
    assert (inside.ulysses, inside.ring) == (8, 1)
    assert (across.ulysses, across.ring) == (8, 2)


def test_a_kind_that_the_heads_do_not_divide_into_is_refused():
    with pytest.raises(ValueError, match="CP 64 as ulysses does not fit"):
        _ = workload(cp=ContextParallel.ulysses(64)).degrees


def test_experts_are_divided_over_their_own_ranks():
    def of(**layout):
        return workload("mixtral_8x7b", **layout)

    card = CARDS["mixtral_8x7b"]
    experts = card.layers * 8 * 3 * card.hidden * card.ffn_hidden
    assert of(dp=8).weights(0) - of(dp=8, ep=4).weights(0) == experts * 3 / 4
    assert of(tp=2, dp=4, etp=1).weights(0) - of(tp=2, dp=4).weights(0) == experts / 2
    whole, divided = of(tp=2, dp=4), of(tp=2, dp=4, ep=8, etp=1)
    assert (whole.expert_replicas, divided.expert_replicas) == (4, 1)
    # All ranks together hold the state of every parameter once.
    assert whole.shard(0) == pytest.approx(divided.shard(0))
