# SPDX-License-Identifier: Apache-2.0
"""A rehearsal keeps a recipe's structure and obeys its constraints, on however few ranks."""

import math
from dataclasses import replace

import pytest

from custom_modules.rope.config import RopeScaling
from recipes.constraints import rope as rope_constraints
from recipes.constraints import train_short, violations
from recipes.models import CARDS
from recipes.planner.feasibility import training_step
from recipes.planner.workload import Workload
from recipes.rehearsal import shrink
from recipes.rehearsal.plan import PEAK, STEPS, rehearsal
from recipes.rehearsal.shrink import ParallelDegrees, fewer_ranks
from recipes.rehearsal.tiles import micro_batches
from recipes.shipped.table import ROWS
from recipes.spec.units import GiB, K, M
from tests.recipes.support.rows_to_rehearse import ROWS_TO_REHEARSE

ALL = {**ROWS, **ROWS_TO_REHEARSE}
KINDS = dict(zip(shrink.RANKS_BY_KIND, (8, 4, 2, 4, 16), strict=True))


def of(name: str, ranks: int = 4):
    return rehearsal(ALL[name], ranks=ranks, rows=ROWS)


def broken(made) -> list[str]:
    """Return the constraints that the small nouns violate, as numbers."""
    found = []
    card = made.card
    for part in made.parts:
        stage, layout = part.stage, part.layout
        rope = card.native_rope if stage.rope == "native" else stage.rope
        workload = Workload(
            card=card, seq_length=stage.seq_length, tokens_per_batch=stage.tokens_per_batch,
            layout=layout, gpus_per_node=layout.world_size,
        )  # fmt: skip
        found += violations.violations(training_step(workload, layout.world_size))
        found += rope_constraints.violations(rope, documents=stage.documents)
        found += train_short.violations(
            target_length=stage.positions.target_length if stage.positions.kind != "gene" else None,
            source_length=None, largest_scale=None, seq_length=stage.seq_length,
            documents=stage.documents, rope=rope,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 32])
def test_every_row_obeys_the_constraints_on_so_many_ranks(name, ranks):
    made = of(name, ranks)
    assert broken(made) == []
    assert made.ranks <= ranks
    assert len(set(made.stage_names)) == 2


@pytest.mark.parametrize("name", ALL)
def test_what_a_row_does_is_done_small(name):
    made = of(name, 32)
    for whole, small in zip(made.whole, made.parts, strict=True):
        before = ParallelDegrees.of(made.whole_card, whole.stage.seq_length, whole.layout,
                           whole.ranks_per_node)  # fmt: skip
        after = ParallelDegrees.of(
            made.card, small.stage.seq_length, small.layout, small.ranks_per_node
        )
        for kind, size in before.ranks.items():
            assert (after.ranks[kind] > 1) == (size > 1), kind
        assert (after.cp.heads_per_stage is None) == (before.cp.heads_per_stage is None)
        if before.cp.heads_per_stage:
            heads = made.whole_card.heads // whole.layout.tp
            staged = before.cp.heads_per_stage < heads
            assert (after.cp.heads_per_stage < made.card.heads // small.layout.tp) == staged
        assert made.card.heads // made.card.kv_heads == (
            made.whole_card.heads // made.whole_card.kv_heads
        )
        for noun in ("recompute", "tiling", "offload"):
            kept, had = getattr(small.layout, noun), getattr(whole.layout, noun)
            for field in ("kind", "loss", "mlp", "tensors", "modules"):
                assert getattr(kept, field, None) == getattr(had, field, None)
            assert (getattr(kept, "every", 1) > 1) == (getattr(had, "every", 1) > 1)
        assert small.layout.precision == whole.layout.precision
        assert small.stage.documents == whole.stage.documents
        assert small.stage.positions.kind == whole.stage.positions.kind
        assert small.stage.steps == STEPS
        assert small.stage.lr == replace(whole.stage.lr, peak=small.stage.lr.peak)


def test_a_context_grows_as_much_as_the_recipe_s_and_its_rotation_reaches_as_far():
    made = of("second")
    before, after = (part.stage for part in made.parts)
    assert after.seq_length / before.seq_length == 4
    assert after.lr.peak == before.lr.peak == pytest.approx(PEAK)
    rope = made.card.native_rope
    assert (rope.base, rope.factor) == (500_000, 8)
    assert rope.original_length / after.seq_length == 8 / 64


def test_a_rotation_on_another_shrinks_with_it():
    made = of("hybrid")
    rope = made.parts[1].stage.rope
    assert (rope.method, rope.factor, rope.before.method) == ("yarn", 32, "llama3")
    assert rope.reach == made.parts[1].stage.seq_length
    assert rope.original_length == made.card.native_context
    assert rope.before.original_length * 16 == rope.original_length


def test_divisors_follow_the_head_that_shrinks():
    whole, made = ALL["longrope"].stage.rope, of("longrope")
    rope = made.parts[1].stage.rope
    assert made.card.head_dim == 32
    assert rope.long_factor == whole.long_factor[::4]
    assert len(rope.short_factor) == 16


def test_a_drawn_rotation_reaches_its_small_target():
    stage = of("gene").parts[1].stage
    assert stage.rope.reach == stage.positions.target_length
    least = math.ceil(stage.seq_length / stage.rope.original_length)
    assert stage.rope.factor // least * least == stage.rope.factor


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_pattern_keeps_its_full_and_local_layers_on_every_pipeline_rank(ranks):
    whole, made = ALL["windows"], of("windows", ranks)
    pattern, pp = made.card.pattern, made.parts[-1].layout.pp
    assert pattern.every == whole.card.pattern.every == 4
    assert made.card.layers == 4 * pp
    by = 64 * K // made.parts[-1].stage.seq_length
    assert pattern.window * by == whole.card.pattern.window
    assert pattern.window < min(part.stage.seq_length for part in made.parts)
    assert pattern.local_rope == whole.card.pattern.local_rope  # a plain one has no length
    assert made.parts[-1].stage.rope.original_length * by == 8 * K


def test_two_rotations_stay_two_and_the_window_at_least_a_token():
    card, made = CARDS["gemma3_1b"], of("two_rotations")
    assert made.card.pattern.local_rope.base == 10_000 != made.card.native_rope.base
    assert 1 <= made.card.pattern.window < card.pattern.window
    assert (made.card.layers, made.card.pattern.every) == (6, 6)
    stretched = replace(
        card.pattern,
        window=3,
        local_rope=RopeScaling.linear(base=10_000, factor=4, original_length=1 * M),
    )
    row = ALL["two_rotations"]
    changed = replace(row, card=replace(card, pattern=stretched))
    small = rehearsal(changed, ranks=1, rows=ROWS)
    assert small.card.pattern.window == 1
    by = 1 * M // small.parts[-1].stage.seq_length
    assert small.card.pattern.local_rope.original_length * by == 1 * M


@pytest.mark.parametrize(("ranks", "layers"), [(1, 4), (2, 4), (4, 4)])
def test_layers_without_rotation_are_among_the_small_ones(ranks, layers):
    made = of("unrotated", ranks)
    assert made.card.layers == layers
    assert made.card.pattern == ALL["unrotated"].card.pattern
    said = "no rotation in every 4th layer"
    assert ("layers that differ", said, said) in made.compared()


def test_experts_stay_more_than_a_token_takes():
    card = of("experts").card
    assert (card.family, card.experts, card.experts_per_token) == ("mixtral", 8, 2)


def test_before_a_first_stage_stand_random_weights_at_the_card_s_own_context_and_rotation():
    made = of("hybrid")
    before, after = (part.stage for part in made.parts)
    assert (before.start, after.start) == ("scratch", "card")
    assert (before.rope, before.seq_length) == ("native", made.card.native_context)
    assert made.parts[0].ladder.name == "native"
    assert any("published weights" in note for note in made.notes())


def test_a_stand_in_has_a_micro_batch_for_each_data_rank_of_a_small_batch():
    row = ALL["llama31_8b_nemo_64k"]
    short = replace(row.stage, seq_length=2 * K, tokens_per_batch=8 * K, start="card")
    layout = replace(row.layout, dp=2)
    row = replace(
        row, ladder=replace(row.ladder, stages=(short,)), seq_length=2 * K, layout=layout, nodes=2
    )
    before = rehearsal(row, ranks=4, rows={}).whole[0]
    assert before.stage.tokens_per_batch == 2 * row.card.native_context
    assert micro_batches(before.stage, layout) == 1


def test_a_context_as_long_as_the_card_s_own_has_a_folder_of_its_own():
    made = of("same")
    assert made.parts[0].stage.seq_length == made.parts[1].stage.seq_length
    assert made.stage_names == ["llama2_native_64", "llama2_same_64"]


def test_a_later_stage_is_rehearsed_with_the_one_before_it_and_that_one_s_layout():
    row = ALL["second"]
    first = replace(row, seq_length=16 * K, layout=ALL["first"].layout)
    made = rehearsal(row, ranks=8, rows={first.name: first})
    assert [part.stage for part in made.whole] == list(row.ladder.stages)
    assert [part.layout for part in made.whole] == [first.layout, row.layout]
    assert [part.stage.start for part in made.parts] == ["scratch", "previous"]
    assert [part.layout.dp for part in made.parts] == [2, 1]


def test_a_stage_before_without_a_row_has_the_row_s_own_layout():
    assert [part.layout for part in of("second").whole] == [ALL["second"].layout] * 2


def test_a_ladder_from_random_weights_is_rehearsed_into_its_second_stage():
    made = of("tiny_512")
    assert [part.stage.seq_length for part in made.whole] == [512, 2 * K]


def test_a_single_stage_from_random_weights_starts_from_a_stand_in():
    assert [part.stage.start for part in of("scratch").parts] == ["scratch", "card"]


def test_too_few_ranks_leave_out_kinds_in_their_order_and_say_so():
    assert fewer_ranks(KINDS, 1) == dict.fromkeys(KINDS, 1)
    assert list(fewer_ranks(KINDS, 2).values()) == [2, 1, 1, 1, 1]
    assert list(fewer_ranks(KINDS, 4).values()) == [2, 2, 1, 1, 1]
    assert list(fewer_ranks(KINDS, 8).values()) == [2, 2, 2, 1, 1]
    made = of("everything", 4)
    said = "TP, PP and DP skipped: not enough ranks; --ranks 32 has room for every kind"
    assert said in made.notes()


def test_stages_of_the_same_length_in_place_of_uneven_ones_are_noted():
    said = [note for note in of("llama31_405b_llama31_128k", 16).notes() if "uneven" in note]
    assert said == ["pipeline stages of uneven length are left out: 2 stages have the same length"]
    assert not any("uneven" in note for note in of("llama31_8b_ultralong_1m").notes())


def test_an_interleaved_pipeline_stays_one_where_the_ranks_hold_a_pipeline():
    made = of("interleaved", 4)
    for part in made.parts:
        layout = part.layout
        assert (layout.pp, layout.vpp) == (2, 2)
        assert micro_batches(part.stage, layout) % layout.pp == 0
    assert of("interleaved", 2).parts[1].layout.vpp == 1


def test_ranks_to_spare_double_what_is_reduced_most():
    assert list(fewer_ranks(KINDS, 64).values()) == [2, 2, 2, 2, 4]
    assert list(fewer_ranks({"CP ring": 8, "DP": 2}, 16).values()) == [8, 2]
    assert list(fewer_ranks({"CP ring": 3}, 4).values()) == [2]


def test_what_cpu_does_not_have_is_left_out_with_a_note():
    made = of("gpuonly")
    layout = made.parts[1].layout
    assert (layout.fp8.recipe, layout.sharding, layout.cp.how.kind) == (
        "none", "optimizer", "hybrid",
    )  # fmt: skip
    notes = " ".join(made.notes())
    for word in ("fp8 tensorwise", "Megatron FSDP", "a2a+p2p", "Transformer Engine's layers"):
        assert word in notes
    offloaded = of("offloaded")
    assert offloaded.parts[1].layout.optimizer_offload == 0
    assert "no part of it is offloaded" in " ".join(offloaded.notes())


def test_tiles_stay_several_and_an_offload_s_cap_as_tight():
    made = of("chunked")
    layout, stage = made.parts[1].layout, made.parts[1].stage
    tokens = stage.seq_length // layout.cp.size
    assert layout.tiling.loss_tile * 4 == layout.tiling.mlp_tile * 4 == tokens
    assert 0 < layout.offload.cap_gib * GiB < 2**24


def test_a_wide_ladder_keeps_its_ratio_as_far_as_a_laptop_goes():
    before, after = (part.stage.seq_length for part in of("wide").parts)
    assert after / before == 15 * M / (128 * K)
    assert after <= shrink.LONGEST_OF_WIDE


def test_a_tokenizer_with_more_tokens_has_their_rows():
    made = rehearsal(ALL["tiny_2k"], ranks=2, rows=ROWS, vocab=2048)
    assert made.card.vocab == 2048


def test_a_vocabulary_that_is_padded_is_padded_in_its_rehearsal_too():
    row = ALL["first"]
    assert of("first").card.vocab == shrink.VOCAB
    odd = replace(row, card=replace(row.card, vocab=row.card.vocab + 1))
    assert rehearsal(odd, ranks=8, rows=ROWS).card.vocab == shrink.VOCAB + 1


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="at least 1 rank; got 0"):
        of("tiny_2k", 0)
