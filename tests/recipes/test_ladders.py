# SPDX-License-Identifier: Apache-2.0
"""Each shipped ladder against the figures that its source states, and against its cards."""

import importlib
import re
from pathlib import Path

import pytest

from custom_modules.rope.config import RopeScaling
from recipes import ladders
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped.rotation import rotation_refusal
from recipes.spec import cluster
from recipes.spec.naming import recipe_name
from recipes.spec.stage import Ladder, Linear, Stage
from recipes.spec.units import K
from tests.recipes.support.stated_figures import M4, M8, STATED, TOTALS

EACH_LADDER = pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
OF_CARDS = [(ladder, card) for ladder in LADDERS.values() for card in ladder.cards]
EACH_CARD = pytest.mark.parametrize(
    ("ladder", "name"), OF_CARDS, ids=lambda value: value if isinstance(value, str) else value.name
)

READ = {
    "length": lambda stage: stage.seq_length,
    "tokens": lambda stage: stage.tokens,
    "method": lambda stage: stage.rope.method,
    "base": lambda stage: stage.rope.base,
    "factor": lambda stage: stage.rope.factor,
    "original": lambda stage: stage.rope.original_length,
    "beta_fast": lambda stage: stage.rope.beta_fast,
    "steps": lambda stage: stage.steps,
    "sequences": lambda stage: stage.sequences_per_batch,
    "batch": lambda stage: stage.tokens_per_batch,
    "peak": lambda stage: stage.lr.peak,
    "end": lambda stage: round(stage.lr.peak * stage.lr.final_ratio, 12),
    "warmup": lambda stage: stage.lr.warmup_steps(stage.steps),
    "decay": lambda stage: stage.weight_decay,
    "beta2": lambda stage: stage.adam_beta2,
    "documents": lambda stage: stage.documents,
    "target": lambda stage: stage.target_length,
    "start": lambda stage: stage.start,
    "optimizer": lambda stage: stage.optimizer,
}
"""How a figure is read off a stage, by the name it has below."""


@pytest.mark.parametrize(("name", "lengths", "place"), STATED, ids=[row[0] for row in STATED])
def test_a_stage_has_the_figures_that_its_source_states(name, lengths, place):
    ladder = LADDERS[name]
    assert [stage.seq_length for stage in ladder.stages] == list(lengths), place
    for length, figures in lengths.items():
        read = {figure: READ[figure](ladder[length]) for figure in figures}
        assert read == figures, f"{length:,} tokens: {place}"


@pytest.mark.parametrize(("name", "tokens", "place"), TOTALS, ids=[row[0] for row in TOTALS])
def test_the_tokens_of_a_ladder_are_those_published(name, tokens, place):
    trained = sum(stage.steps * stage.tokens_per_batch for stage in LADDERS[name].stages)
    assert trained == pytest.approx(tokens, rel=0.05), place


def test_every_ladder_with_a_source_is_held_to_it():
    assert {row[0] for row in STATED} == set(LADDERS) - {"tiny", "nemo"}


@EACH_LADDER
def test_a_ladder_says_for_which_models_and_on_which_data(ladder):
    assert ladder.cards
    assert ladder.data


@EACH_LADDER
def test_a_ladder_says_what_is_ours_and_where_it_departs_from_its_source(ladder):
    assert ladder.ours or ladder.departures
    for sentence in (*ladder.ours, *ladder.departures):
        assert not sentence[0].islower()
        assert sentence.endswith(".")


MODULES = sorted(Path(ladders.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_what_a_module_marks_as_ours_its_ladders_say(module):
    if re.search(r"# ours\b", module.read_text()):
        made = importlib.import_module(f"recipes.ladders.{module.stem}")
        for ladder in vars(made).values():
            assert not isinstance(ladder, Ladder) or ladder.ours


def test_ladders_whose_source_began_with_a_tuned_model_say_so():
    tuned = {ladder.name for ladder in LADDERS.values() if ladder.starts_from.endswith("-Instruct")}
    assert tuned == {
        "prolong", "longrecipe_128k", "ultralong_1m", "ultralong_2m", "ultralong_4m",
        "fifteen_million",
    }  # fmt: skip


def test_what_fits_the_machine_of_a_source_is_what_the_ladder_says():
    from recipes.planner.search.alternatives import lacks
    from recipes.planner.search.ranking import search
    from recipes.planner.search.request import of_stage
    from recipes.spec.layout import Fp8

    machine = cluster.load("dgx_h100")
    asked, said = {}, {}
    for name, nodes in (("five_million", 1), ("fifteen_million", 4)):
        ladder = LADDERS[name]
        asked[name] = of_stage(
            CARDS[ladder.cards[0]], ladder.stages[0], machine, gpus=8 * nodes, fp8=Fp8()
        )
        said[name] = " ".join(ladder.departures)
    short = lacks(search(asked["five_million"]).nearest).removesuffix(" of GPU memory")
    assert f"5,242,880 {short.replace('lacks', 'lack')} per GPU" in said["five_million"]
    assert "5,120,000 tokens fit there with Adam on the host" in said["five_million"]
    assert search(asked["five_million"].at_length(5_120_000)).plans[0].untried
    assert "15,728,640 tokens fit there" in said["fifteen_million"]
    assert not search(asked["fifteen_million"]).plans[0].untried


EXTENDED = {"olmo3_7b", "olmo3_32b", "smollm3_3b", "gemma3_270m", "gemma3_1b"}
"""Cards that no source extends: a ladder's last stage made them, or no figures are published."""


def test_every_card_that_a_source_extends_is_on_a_ladder():
    on_a_ladder = {card for ladder in LADDERS.values() for card in ladder.cards}
    assert on_a_ladder | EXTENDED == set(CARDS)
    assert not on_a_ladder & EXTENDED


@EACH_LADDER
def test_tokens_per_batch_change_only_where_the_source_changes_them(ladder):
    batches = {stage.tokens_per_batch for stage in ladder.stages}
    if ladder.name == "prolong":
        assert batches == {M4, M8}
    elif ladder.name == "llama31":  # 48K and 96K do not divide 16M
        assert max(batches) / min(batches) < 1.07
    elif ladder.name == "tiny":  # ours: the last stage's is one sequence of it
        assert batches == {4 * K, 8 * K}
    else:
        assert len(batches) == 1


@EACH_CARD
def test_the_rotations_of_a_ladder_are_right_for_its_cards(ladder, name):
    if ladder.stages[0].start == "scratch":  # it stretches what it trained itself
        return
    for stage in ladder.stages:
        assert rotation_refusal(CARDS[name], stage) is None


@EACH_CARD
def test_a_ladder_goes_beyond_what_its_cards_were_trained_on(ladder, name):
    if ladder.name == "nemo" or name == "llama31_405b":  # a length to train at; been through it
        return
    assert ladder.stages[-1].target_length > CARDS[name].native_context


@pytest.mark.parametrize(
    ("ladder", "card", "words"),
    [
        ("yarn", "llama3_8b", "base 500,000 on 8,192"),
        ("lwm", "nemotron4_15b", "turns 0.5 of a head"),
        ("prolong", "llama31_8b", "the scaling that llama31_8b was trained with"),
        ("llama2_long_32k", "qwen25_7b", "base 500,000 is below that of qwen25_7b"),
        ("longrope2", "llama32_1b", "64 divisors, for heads of 128, and heads of llama32_1b have"),
    ],
)
def test_a_card_that_a_rotation_is_wrong_for_would_be_found(ladder, card, words):
    assert words in str(rotation_refusal(CARDS[card], LADDERS[ladder].stages[0]))


@EACH_LADDER
def test_a_rotation_reaches_the_context_that_its_stage_trains_for(ladder):
    for stage in ladder.stages:
        scaled = stage.rope != "native" and stage.rope.method != "default"
        # Factors of one rotation for several lengths, as published.
        if scaled and not ladder.name.startswith(("llama31", "apertus", "deepseek_v3")):
            assert stage.rope.reach == stage.target_length


def test_the_base_of_longrecipe_is_that_of_dynamic_ntk_at_its_target():
    [stage] = LADDERS["longrecipe_128k"].stages
    growth = 16 * (stage.target_length / 8192) - 15
    assert stage.rope.base == pytest.approx(500_000 * growth ** (128 / 126), rel=1e-3)
    assert stage.seq_length == pytest.approx(0.3 * 128_000)


def test_the_divisors_of_longrope2_are_in_the_space_that_its_search_has():
    rope = LADDERS["longrope2"].stages[0].rope
    long = rope.long_factor
    assert rope.short_factor == [1.0] * 64
    assert long == sorted(long)
    assert long[0] == 1
    assert long[29] < 16 == long[30] == long[63]
    assert long[15] == pytest.approx(4)


def test_a_rate_that_falls_by_a_line_is_of_the_ladders_whose_source_states_it():
    lines = {
        ladder.name
        for ladder in LADDERS.values()
        for stage in ladder.stages
        if isinstance(stage.lr, Linear) and stage.lr.final_ratio < 1
    }
    assert lines == {"yarn", "olmo3_7b", "olmo3_32b"}


def test_documents_are_kept_apart_by_the_ladders_whose_source_does_or_that_say_it_is_ours():
    apart = {
        ladder.name
        for ladder in LADDERS.values()
        for stage in ladder.stages
        if stage.documents == "within"
    }
    stated = {"llama31", "prolong", "smollm3", "olmo3_7b", "olmo3_32b"}
    stated |= {name for name in LADDERS if name.startswith("apertus")}
    assert apart == stated | {"minimax01", "megabeam"}


def test_a_length_in_the_name_of_a_ladder_is_not_said_twice():
    names = {recipe_name(CARDS[card], ladder, ladder.stages[0]) for ladder, card in OF_CARDS}
    assert {
        "llama31_8b_ultralong_1m",
        "llama31_8b_ultralong_2m",
        "llama31_8b_ultralong_4m",
        "llama2_7b_llama2_long_32k",
        "llama2_70b_llama2_long_16k",
        "llama3_8b_longrecipe_128k",
        "llama3_8b_longrope2_128k",
        "llama3_8b_five_million_5m",
        "llama31_8b_fifteen_million_15m",
        "llama2_7b_gene_64k",
        "llama2_7b_yarn_64k",
        "llama32_1b_nemo_16k",
        "tiny_512",
    } <= names


def test_no_two_recipes_have_one_name():
    names = [
        recipe_name(CARDS[card], ladder, stage)
        for ladder, card in OF_CARDS
        for stage in ladder.stages
    ]
    assert len(set(names)) == len(names)


def test_a_length_in_the_name_of_a_longer_ladder_is_said_again():
    stage = LADDERS["yarn"].stages[0]
    long = Stage(
        seq_length=131_072,
        rope=RopeScaling.base_change(10_000),
        tokens=131_072,
        tokens_per_batch=131_072,
        lr=stage.lr,
    )
    ladder = Ladder(name="two_64k", source="a test", stages=(stage, long))
    card = CARDS["llama2_7b"]
    named = [recipe_name(card, ladder, one) for one in ladder.stages]
    assert named == ["llama2_7b_two_64k_64k", "llama2_7b_two_64k_128k"]
