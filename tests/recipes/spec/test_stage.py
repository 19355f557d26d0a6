# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, OtherLength
from recipes.ladders import LADDERS
from recipes.models import CARDS, TINY
from recipes.spec import naming
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Cosine, Ladder, Linear, Stage
from recipes.spec.train_short import Positions
from recipes.spec.units import K, M


def stage(**change) -> Stage:
    """Return a stage of 512 tokens that fits, with some fields changed."""
    fields = {
        "seq_length": 512,
        "rope": RopeScaling.base_change(10_000),
        "tokens": 100 * 4096,
        "tokens_per_batch": 4096,
        "lr": Cosine(peak=1e-3),
    }
    return Stage(**fields | change)


def ladder(*stages: Stage) -> Ladder:
    return Ladder(name="trial", source="a test", stages=stages)


def test_units_are_binary():
    assert (K, M) == (1024, 1_048_576)


def test_a_budget_becomes_whole_steps_of_whole_sequences():
    assert stage().steps == 100
    assert stage().sequences_per_batch == 8


@pytest.mark.parametrize(("tokens", "steps"), [(4096, 1), (10_000, 2), (11_000, 3)])
def test_a_budget_that_ends_inside_a_batch_is_rounded_to_the_nearest_step(tokens, steps):
    assert stage(tokens=tokens).steps == steps


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_length": 0}, "seq_length is 0; it must be positive"),
        ({"tokens": -1}, "tokens is -1; it must be positive"),
        ({"tokens_per_batch": 0}, "tokens_per_batch is 0; it must be positive"),
        ({"tokens_per_batch": 5000}, "5,000 is not a multiple of seq_length 512"),
        ({"tokens": 2048}, "tokens 2,048 is less than one batch of 4,096"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_budget_that_no_stage_can_keep_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        stage(**change)


def test_an_original_length_above_the_target_is_refused():
    rope = RopeScaling.yarn(base=10_000, factor=2.0, original_length=1024)
    assert stage(rope=rope, positions=Positions.pose(2048)).target_length == 2048
    with pytest.raises(ValueError, match="original_length is 1,024, above the 512 tokens"):
        stage(rope=rope)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peak": 0.0}, "peak learning rate is 0.0"),
        ({"peak": 3.0}, "peak learning rate is 3.0"),
        ({"final_ratio": 1.5}, "final_ratio is 1.5"),
        ({"warmup_ratio": -0.1}, "warmup_ratio is -0.1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", [Cosine, Linear])
def test_a_rate_that_no_schedule_has_is_refused(schedule, change, words):
    with pytest.raises(ValueError, match=words):
        schedule(**{"peak": 1e-3} | change)


@pytest.mark.parametrize(("steps", "warmup"), [(200, 20), (15, 2), (3, 1), (1, 1)])
def test_warm_up_is_a_share_of_the_steps_and_at_least_one(steps, warmup):
    assert Cosine(peak=1e-3, warmup_ratio=0.1).warmup_steps(steps) == warmup


def test_a_ladder_gives_its_stage_by_length():
    short, long = stage(start="scratch"), stage(seq_length=1024)
    assert ladder(short, long)[1024] is long


def test_a_stage_that_trains_short_for_a_longer_context_follows_a_longer_one():
    whole = stage(seq_length=1024, start="card")
    short = stage(positions=Positions.pose(4096))
    found = ladder(whole, short, stage(seq_length=4096))
    assert [one.target_length for one in found.stages] == [1024, 4096, 4096]
    assert found[512] is short


def test_a_recovery_stage_follows_a_longer_one_and_keeps_its_context():
    recovery = stage(recovers=4096, seq_length=256, start="previous")
    long = stage(seq_length=4096, tokens_per_batch=8192, start="card")
    found = ladder(long, recovery)
    assert [each.target_length for each in found.stages] == [4096, 4096]
    with pytest.raises(ValueError, match=r"ladder trial shrinks: a stage for 256 tokens"):
        ladder(long, stage(seq_length=256))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recovers": 512}, "recovers is 512, the context that the stage keeps; it must be above"),
        ({"recovers": 4096, "positions": Positions.pose(2048)}, "has consecutive positions"),
        ({"mix": Mix(), "positions": Positions.pose(2048)}, "has a mix and draws positions"),
        ({"mix": Mix(other_lengths=[OtherLength(seq_length=64, steps=0.1)])}, "documents: within"),
        ({"mix": Mix(other_lengths=[OtherLength(seq_length=100, steps=0.1)])}, "whole part"),
        ({"mix": Mix(overlap=512)}, "overlap is 512, not less than 512"),
    ],
)
def test_a_mix_or_recovery_that_a_stage_cannot_have_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        stage(**change)


def test_a_ladder_that_names_a_card_twice_is_refused():
    with pytest.raises(ValueError, match="names card tiny twice"):
        Ladder(name="trial", source="", stages=(stage(start="card"),), cards=("tiny", "tiny"))


def test_a_length_that_the_ladder_lacks_is_refused_with_those_it_has():
    with pytest.raises(KeyError, match="no stage of 2,048 tokens, only 512, 1,024"):
        ladder(stage(start="scratch"), stage(seq_length=1024))[2048]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "has no stage"),
        ([stage()], "the first stage has no previous one"),
        ([stage(start="card"), stage()], "has 2 stages of 512 tokens, .* share a name"),
        ([stage(seq_length=1024, start="card"), stage()], "for 512 tokens follows one for 1,024"),
        (
            [stage(start="card", positions=Positions.pose(4096)), stage(seq_length=2048)],
            "for 2,048 tokens follows one for 4,096",
        ),
        (
            [
                stage(start="card"),
                stage(seq_length=1024),
                stage(positions=Positions.pose(2048)),
            ],
            "has 2 stages of 512 tokens",
        ),
        ([stage(start="card"), stage(seq_length=1024, start="card")], "starts from 'card'"),
    ],
    ids=[
        "empty",
        "no first start",
        "same length",
        "shrinking",
        "shrinking target",
        "same folder",
        "second start",
    ],
)
def test_a_ladder_that_leads_nowhere_is_refused(stages, words):
    with pytest.raises(ValueError, match=words):
        ladder(*stages)


def test_yarn_of_the_rehearsal_starts_from_the_length_of_the_stage_before():
    _, before, after = LADDERS["tiny"].stages
    assert after.rope.method == "yarn"
    assert after.rope.original_length == before.seq_length
    assert after.rope.factor * before.seq_length == after.seq_length
    assert after.rope.base == before.rope.base


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 0}, "layout tp is 0"),
        ({"dp": -1}, "layout dp is -1"),
        ({"micro_batch": 0}, "layout micro_batch is 0"),
        ({"cp": ContextParallel.ulysses(0)}, "layout cp is 0"),
    ],
    ids=str,
)
def test_a_layout_of_no_ranks_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Layout(**change)


def test_a_document_policy_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="documents is 'apart'; it must be 'across'"):
        stage(documents="apart")


@pytest.mark.parametrize(
    ("shared", "size", "how"),
    [
        (ContextParallel.auto(3), 3, ContextParallelKind(kind="auto")),
        (ContextParallel.ring(4), 4, ContextParallelKind(kind="ring")),
        (ContextParallel.head_chunked(8), 8, ContextParallelKind(kind="head_chunked")),
        (
            ContextParallel.hybrid(ulysses=8, ring=4, heads_per_stage=16),
            32,
            ContextParallelKind(kind="hybrid", ulysses=8, heads_per_stage=16),
        ),
        (ContextParallel.transformer_engine("p2p", 4), 4, ContextParallelKind(kind="p2p")),
        (
            ContextParallel.transformer_engine_hybrid(a2a=2, p2p=4),
            8,
            ContextParallelKind(kind="a2a+p2p", ulysses=2),
        ),
    ],
    ids=lambda value: value.how.kind if isinstance(value, ContextParallel) else "",
)
def test_a_named_kind_has_its_size_and_degrees(shared, size, how):
    assert (shared.size, shared.how) == (size, how)


def test_the_ranks_of_a_layout_are_the_product_of_its_sizes():
    assert Layout(tp=2, cp=ContextParallel.ulysses(3), pp=5, dp=7).world_size == 210


def test_a_card_whose_heads_cannot_share_kv_heads_is_refused():
    fields = {name: getattr(TINY, name) for name in ModelCard.__dataclass_fields__}
    with pytest.raises(ValueError, match="4 heads do not divide into 3 KV heads"):
        ModelCard(**fields | {"kv_heads": 3})


def test_the_first_stage_begins_from_what_the_ladder_says_and_the_next_from_it():
    card, shipped = CARDS["llama31_8b"], LADDERS["nemo"]
    starts = [naming.start_folder(card, shipped, one, Path("out")) for one in shipped.stages]
    assert starts == [
        Path("models/llama31_8b"),
        Path("out/stages/llama31_8b_nemo_16k/checkpoints"),
        Path("out/stages/llama31_8b_nemo_64k/checkpoints"),
    ]


def test_a_stage_from_scratch_begins_from_nothing():
    shipped = LADDERS["tiny"]
    assert naming.start_folder(TINY, shipped, shipped[512], Path("out")) is None
