# SPDX-License-Identifier: Apache-2.0
"""A stage's choice of positions: what it refuses, what it becomes, which constraints it meets."""

import functools

import fiddle as fdl
import nemo_run as run
import pytest
import torch

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.gene import gene_rotation
from recipes.constraints.train_short import violations
from recipes.models import TINY
from recipes.pretrain import data_module, pretrain
from recipes.resolved import yaml_file
from recipes.resolved.check import check, notes
from recipes.resolved.overrides import override
from recipes.resolved.read import trained_length
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.train_short import Positions

GENE = gene_rotation(base=10_000, factor=8.0, original_length=256, head_dim=32)
YARN = RopeScaling.yarn(base=10_000, factor=8.0, original_length=256)
POSE = Positions.pose(2048)
DIGITS = Positions.longrecipe(2048, sentences="digits", keep_others=0.5)


def stage(positions: Positions, **change) -> Stage:
    fields = {
        "seq_length": 512,
        "rope": YARN,
        "tokens": 10 * 2048,
        "tokens_per_batch": 2048,
        "lr": Cosine(peak=1e-3),
        "start": "scratch",
        "positions": positions,
    }
    return Stage(**fields | change)


def recipe(positions: Positions, *, cp: int = 1, **change) -> run.Partial:
    only = stage(positions, **change)
    layout = Layout(cp=ContextParallel.ulysses(cp), precision="fp32", device="cpu")
    return pretrain(TINY, Ladder(name="tiny", source="a test", stages=(only,)), 512, layout)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "random"}, "'random' are unknown; choose consecutive, pose, longrecipe or gene"),
        ({"target_length": 9}, "target_length has no effect on positions consecutive"),
        ({"kind": "pose"}, "positions pose need target_length, .* got None"),
        ({"kind": "pose", "target_length": 2**31 + 1}, r"up to 2\^31; got 2147483649"),
        ({"kind": "pose", "target_length": 9, "chunks": 1}, "chunks is 1"),
        ({"kind": "pose", "target_length": 9, "sentences": "digits"}, "sentences has no effect"),
        ({"kind": "gene", "target_length": 9, "chunks": 3}, "chunks has no effect on .* gene"),
        ({"kind": "longrecipe", "target_length": 9, "sentences": "odd"}, "sentences is 'odd'"),
        ({"kind": "longrecipe", "target_length": 9, "keep_others": 0.5}, "on sentences 'all'"),
        (
            {"kind": "longrecipe", "target_length": 9, "sentences": "digits", "keep_others": 1},
            "keep_others is 1; it is a probability",
        ),
    ],
    ids=str,
)
def test_a_value_out_of_domain_or_without_effect_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Positions(**fields)


def test_a_stage_has_consecutive_positions_and_its_data_module_no_argument_for_them():
    plain = fdl.ordered_arguments(data_module(TINY, stage(Positions()), Layout()))
    assert not {"positions", "rope_scale", "sentences"} & set(plain)


def test_pose_becomes_a_draw_of_positions_that_overrides_reach():
    made = recipe(POSE)
    made.data.positions.target_length = 1024
    check(made)
    draw = fdl.build(made.data.positions)
    positions = draw(torch.zeros(512), torch.Generator().manual_seed(3))
    assert positions.diff().max() > 1
    assert positions[-1] < 1024


@pytest.mark.parametrize("positions", [POSE, DIGITS], ids=lambda p: p.kind)
def test_a_recipe_comes_back_from_its_file(positions, tmp_path):
    made = recipe(positions)
    yaml_file.write(made, tmp_path / "recipe.yaml")
    back = yaml_file.read(tmp_path / "recipe.yaml")
    check(back)
    assert yaml_file.dump(back) == yaml_file.dump(made)


@pytest.mark.parametrize(
    ("positions", "change", "words"),
    [
        (POSE, {}, {"positions.target_length": 1024, "positions.chunks": 3}),
        (DIGITS, {}, {"positions.target_length": 1024, "sentences.keep_others": 0.25}),
        (Positions.gene(2048), {"rope": GENE}, {"rope_scale.least": 1, "rope_scale.scales": 8}),
    ],
    ids=["pose", "longrecipe", "gene"],
)
def test_what_is_drawn_is_overridden_by_words(positions, change, words):
    made = override(
        recipe(positions, **change), [f"data.{key}={value}" for key, value in words.items()]
    )
    for key, value in words.items():
        assert functools.reduce(getattr, key.split("."), made.data) == value


def test_a_word_that_breaks_a_law_of_positions_is_refused():
    with pytest.raises(ValueError, match="target_length 512, and a sequence has 512"):
        override(recipe(POSE), ["data.positions.target_length=512"])


def test_longrecipe_chooses_sentences_from_a_text_of_the_target_length():
    data = recipe(DIGITS).data
    assert (data.sentences.source_length, data.positions.target_length) == (2048, 2048)
    assert (data.sentences.anchors, data.sentences.keep_others) == ("digits", 0.5)
    whole = data_module(TINY, stage(Positions.longrecipe(2048, sentences="all")), Layout())
    assert "sentences" not in fdl.ordered_arguments(whole)


@pytest.mark.parametrize(
    ("seq_length", "least", "scales"), [(256, 1, 8), (512, 2, 4), (1024, 4, 2)]
)
def test_gene_draws_multiples_of_what_the_length_needs_up_to_the_factor(seq_length, least, scales):
    data = data_module(
        TINY, stage(Positions.gene(2048), rope=GENE, seq_length=seq_length), Layout()
    )
    assert (data.rope_scale.least, data.rope_scale.scales) == (least, scales)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ("native", "set its rope to custom_modules.rope.gene.gene_rotation"),
        (RopeScaling.base_change(10_000), "set its rope to"),
        (
            gene_rotation(base=10_000, factor=4.0, original_length=256, head_dim=32),
            "target_length 2,048 and rope reaches 1,024",
        ),
    ],
    ids=["native", "base", "reach"],
)
def test_gene_needs_a_rotation_that_reaches_its_target(rope, words):
    with pytest.raises(ValueError, match=words):
        data_module(TINY, stage(Positions.gene(2048), rope=rope), Layout())


FITS = {
    "target_length": 2048,
    "source_length": 2048,
    "largest_scale": None,
    "seq_length": 512,
    "documents": "across",
    "rope": YARN,
}
NO_SKIPS = {"target_length": None, "source_length": None}
DYNAMIC = RopeScaling.dynamic(base=10_000, factor=8.0, original_length=256)
SEARCHED = RopeScaling(
    method="longrope", base=10_000, factor=8.0, original_length=1024,
    short_factor=[1.0] * 16, long_factor=[2.0] * 16,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"target_length": 2**31},
        {"target_length": None, "source_length": None, "documents": "within", "rope": DYNAMIC},
        {"target_length": None, "source_length": None, "largest_scale": 8, "rope": GENE},
        {"rope": GENE},
        {"rope": SEARCHED, "seq_length": 1025},
    ],
    ids=str,
)
def test_positions_that_fit_violate_no_constraint(change):
    assert list(violations(**FITS | change)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_length": 512}, "target_length 512, and a sequence has 512"),
        ({"target_length": 2**31 + 1}, "at most 2^31"),
        ({"source_length": 511}, "chosen from 511 tokens for a sequence of 512"),
        ({"documents": "within"}, "documents is within"),
        ({"rope": DYNAMIC}, "rope dynamic depends on the sequence length"),
        ({"rope": SEARCHED}, "rope longrope depends on the sequence length"),
        ({"largest_scale": 8}, "rope is yarn; take custom_modules.rope.gene.gene_rotation"),
        ({"largest_scale": 6, "rope": GENE}, "largest scale drawn is 6 and rope factor 8"),
        (
            {**NO_SKIPS, "largest_scale": 8, "rope": GENE, "seq_length": 2048},
            "the 2,048 tokens that rope reaches, and a sequence has 2,048",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_violation_of_positions_is_one_sentence(change, words):
    (sentence,) = violations(**FITS | change)
    assert words in sentence


@pytest.mark.parametrize(
    ("positions", "path", "value", "words"),
    [
        (POSE, "positions.target_length", 512, "a sequence has 512 tokens"),
        (POSE, "documents", "within", "documents is within"),
        (DIGITS, "sentences.source_length", 256, "chosen from 256 tokens"),
    ],
)
def test_the_constraints_are_asked_of_the_tree_too(positions, path, value, words):
    made = recipe(positions)
    *way, name = path.split(".")
    setattr(functools.reduce(getattr, way, made.data), name, value)
    with pytest.raises(ValueError, match=words):
        check(made)


def test_a_scale_beyond_the_factor_is_refused_in_the_tree():
    made = recipe(Positions.gene(2048), rope=GENE)
    made.data.rope_scale.scales = 5
    with pytest.raises(ValueError, match="largest scale drawn is 10 and rope factor 8"):
        check(made)


def test_gene_for_the_length_of_its_sequences_is_refused_as_pose_is():
    same = {"seq_length": 2048, "rope": GENE}
    only = stage(Positions.gene(2048), **same)
    ladder = Ladder(name="tiny", source="a test", stages=(only,))
    with pytest.raises(
        ValueError, match="2,048 tokens that rope reaches, and a sequence has 2,048"
    ):
        pretrain(TINY, ladder, 2048, Layout(precision="fp32", device="cpu"))


def test_a_rotation_is_measured_by_the_target_not_by_the_length_of_a_sequence():
    assert notes(recipe(POSE)) == []
    (note,) = notes(recipe(Positions.pose(4096)))
    assert "reaches 2,048 tokens" in note
    assert "the context is 4,096" in note
    assert trained_length(recipe(Positions.gene(2048), rope=GENE)) == 2048
