# SPDX-License-Identifier: Apache-2.0
"""Frequencies and temperature of every method, against transformers in double precision."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import Rotation, inverse_frequencies

ORIGINAL = 4096
HEADS = pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
FACTORS = pytest.mark.parametrize("factor", [2.0, 4.0, 32.0, 512.0])
PARTS = pytest.mark.parametrize("part", [1.0, 0.5])


@pytest.fixture
def hugging_face(monkeypatch):
    """Return a function that gives what transformers computes, every fp32 in it made float64."""

    def compute(name: str, head_dim: int, *, length=None, **given) -> tuple[torch.Tensor, float]:
        top = {key: given.pop(key) for key in ("part", "positions", "original") if key in given}
        config = LlamaConfig(head_dim=head_dim, rope_theta=given.pop("base"))
        config.max_position_embeddings = top.get("positions", ORIGINAL)
        config.partial_rotary_factor = top.get("part", 1.0)
        if "original" in top:
            config.original_max_position_embeddings = top["original"]
        config.rope_scaling = {"rope_type": name, **given}
        with monkeypatch.context() as patch:
            for alias in ("float", "float32"):
                patch.setattr(torch, alias, torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length)

    return compute


def agree(ours: tuple[torch.Tensor, float], theirs: tuple[torch.Tensor, float]) -> None:
    assert ours[0].dtype == theirs[0].dtype == torch.float64
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12)


def factors_of(pairs: int, seed: int) -> list[float]:
    """Return made-up divisors, one a pair of dimensions."""
    generator = torch.Generator().manual_seed(seed)
    return (1 + 63 * torch.rand(pairs, generator=generator, dtype=torch.float64)).tolist()


def test_there_is_a_test_for_every_method_that_transformers_has():
    assert ROPE_INIT_FUNCTIONS.keys() == {
        "default", "linear", "dynamic", "yarn", "longrope", "llama3"
    }  # fmt: skip


@HEADS
@PARTS
def test_default_is_that_of_transformers(hugging_face, head_dim, part):
    ours = RopeScaling(method="default", base=500_000, partial_rotary_factor=part)
    agree(
        inverse_frequencies(ours, head_dim),
        hugging_face("default", head_dim, base=500_000, part=part),
    )


@HEADS
@FACTORS
@PARTS
def test_linear_is_that_of_transformers(hugging_face, head_dim, factor, part):
    ours = replace(
        RopeScaling.linear(base=10_000, factor=factor, original_length=ORIGINAL),
        partial_rotary_factor=part,
    )
    agree(
        inverse_frequencies(ours, head_dim),
        hugging_face("linear", head_dim, base=10_000, factor=factor, part=part),
    )


@HEADS
@FACTORS
@PARTS
@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL, 512 * ORIGINAL])
def test_dynamic_is_that_of_transformers(hugging_face, head_dim, factor, part, length):
    ours = replace(
        RopeScaling.dynamic(base=10_000, factor=factor, original_length=ORIGINAL),
        partial_rotary_factor=part,
    )
    agree(
        inverse_frequencies(ours, head_dim, length),
        hugging_face("dynamic", head_dim, base=10_000, factor=factor, part=part, length=length),
    )


YARNS = {
    "as in the paper": {},
    "other betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "ramp between dimensions": {"truncate": False},
    "temperature stated": {"attention_factor": 1.25},
    "temperature off": {"attention_factor": 1.0},
    "both mscales": {"mscale": 0.707, "mscale_all_dim": 1.3},
    "both mscales 1": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "one mscale": {"mscale": 0.707},
    "the other mscale": {"mscale_all_dim": 0.707},
    "mscales and temperature": {"mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 1.1},
}


@HEADS
@FACTORS
@PARTS
@pytest.mark.parametrize("given", YARNS.values(), ids=YARNS)
def test_yarn_is_that_of_transformers(hugging_face, head_dim, factor, part, given):
    ours = replace(
        RopeScaling.yarn(base=500_000, factor=factor, original_length=ORIGINAL),
        partial_rotary_factor=part,
        **given,
    )
    theirs = hugging_face(
        "yarn", head_dim, base=500_000, factor=factor, part=part,
        original_max_position_embeddings=ORIGINAL, **given,
    )  # fmt: skip
    agree(inverse_frequencies(ours, head_dim), theirs)


@pytest.mark.parametrize(
    ("base", "original", "betas"),
    [(1e30, 16, (4.0, 3.9)), (10_000, 40, (32.0, 1.0)), (1.5, 10**6, (32.0, 1.0))],
    ids=["a ramp of no width", "a ramp before the first", "a ramp past the last dimension"],
)
def test_yarn_at_the_ends_of_its_ramp_is_that_of_transformers(hugging_face, base, original, betas):
    fast, slow = betas
    ours = RopeScaling(
        method="yarn", base=base, factor=4.0, original_length=original, beta_fast=fast,
        beta_slow=slow,
    )  # fmt: skip
    theirs = hugging_face(
        "yarn", 64, base=base, factor=4.0, beta_fast=fast, beta_slow=slow,
        original_max_position_embeddings=original,
    )  # fmt: skip
    agree(inverse_frequencies(ours, 64), theirs)


@HEADS
@FACTORS
@PARTS
@pytest.mark.parametrize("octaves", [(1.0, 4.0), (2.0, 16.0)])
def test_llama3_is_that_of_transformers(hugging_face, head_dim, factor, part, octaves):
    low, high = octaves
    ours = RopeScaling(
        method="llama3", base=500_000, factor=factor, original_length=ORIGINAL,
        low_freq_factor=low, high_freq_factor=high, partial_rotary_factor=part,
    )  # fmt: skip
    theirs = hugging_face(
        "llama3", head_dim, base=500_000, factor=factor, part=part, low_freq_factor=low,
        high_freq_factor=high, original_max_position_embeddings=ORIGINAL,
    )  # fmt: skip
    agree(inverse_frequencies(ours, head_dim), theirs)


@HEADS
@FACTORS
@PARTS
@pytest.mark.parametrize("temperature", [None, 1.19])
@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 512 * ORIGINAL])
def test_longrope_is_that_of_transformers(
    hugging_face, head_dim, factor, part, temperature, length
):
    pairs = int(head_dim * part) // 2
    lists = {"short_factor": factors_of(pairs, 1), "long_factor": factors_of(pairs, 2)}
    ours = RopeScaling(
        method="longrope", base=10_000, factor=factor, original_length=ORIGINAL,
        attention_factor=temperature, partial_rotary_factor=part, **lists,
    )  # fmt: skip
    theirs = hugging_face(
        "longrope", head_dim, base=10_000, part=part, length=length, original=ORIGINAL,
        positions=int(factor * ORIGINAL), attention_factor=temperature, **lists,
    )  # fmt: skip
    agree(inverse_frequencies(ours, head_dim, length), theirs)


@HEADS
@FACTORS
def test_ntk_is_plain_rope_at_the_base_that_interpolates_the_slowest_dimension(head_dim, factor):
    ours = RopeScaling.ntk(base=10_000, factor=factor, original_length=ORIGINAL)
    found, temperature = inverse_frequencies(ours, head_dim)
    base = 10_000 * factor ** (head_dim / (head_dim - 2))
    plain, _ = inverse_frequencies(RopeScaling.base_change(base), head_dim)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    slowest = 10_000 ** (-(head_dim - 2) / head_dim)
    assert float(found[-1]) == pytest.approx(slowest / factor, rel=1e-12)
    assert (float(found[0]), temperature) == (1.0, 1.0)


@HEADS
@FACTORS
def test_ntk_by_parts_is_yarn_without_its_temperature(head_dim, factor):
    sizes = {"base": 10_000, "factor": factor, "original_length": ORIGINAL}
    ours, temperature = inverse_frequencies(RopeScaling.ntk_by_parts(**sizes), head_dim)
    yarn, _ = inverse_frequencies(RopeScaling.yarn(**sizes), head_dim)
    assert torch.equal(ours, yarn)
    assert temperature == 1.0


STRETCHERS = {
    "linear": RopeScaling.linear(base=10_000, factor=4.0, original_length=ORIGINAL),
    "ntk": RopeScaling.ntk(base=10_000, factor=4.0, original_length=ORIGINAL),
    "ntk_by_parts": RopeScaling.ntk_by_parts(base=10_000, factor=4.0, original_length=ORIGINAL),
    "yarn": RopeScaling.yarn(base=10_000, factor=4.0, original_length=ORIGINAL),
    "llama3": RopeScaling.llama3(base=10_000, factor=4.0, original_length=ORIGINAL),
}


@pytest.mark.parametrize("method", STRETCHERS.values(), ids=STRETCHERS)
@HEADS
def test_stretching_plain_rope_is_the_method_itself(method, head_dim):
    composed = replace(method, before=RopeScaling.base_change(10_000))
    found, temperature = inverse_frequencies(composed, head_dim)
    alone, own = inverse_frequencies(method, head_dim)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)
    assert temperature == own


def test_yarn_on_llama31_keeps_fast_dimensions_and_divides_the_slow_ones_of_llama31():
    llama31 = RopeScaling.llama3()
    longer = RopeScaling.yarn(base=500_000, factor=8.0, original_length=131_072, before=llama31)
    found, temperature = inverse_frequencies(longer, 128)
    before, _ = inverse_frequencies(llama31, 128)
    ratio = before / found
    turns = 131_072 * before / (2 * math.pi)
    # Whole dimensions end the ramp, so those within one of it may be on either side.
    assert torch.equal(ratio[turns > 40], torch.ones(int((turns > 40).sum()), dtype=torch.float64))
    torch.testing.assert_close(ratio[turns < 0.8], torch.full_like(ratio[turns < 0.8], 8.0))
    assert (ratio.diff() >= 0).all()
    assert temperature == pytest.approx(0.1 * math.log(8) + 1)


def test_temperatures_of_a_composition_multiply():
    inner = RopeScaling.yarn(base=10_000, factor=4.0, original_length=2048)
    outer = RopeScaling.yarn(base=10_000, factor=2.0, original_length=8192, before=inner)
    assert outer.temperature == pytest.approx(inner.temperature * (0.1 * math.log(2) + 1))


def test_linear_on_linear_is_linear_by_the_product():
    inner = RopeScaling.linear(base=10_000, factor=4.0, original_length=2048)
    outer = replace(inner, factor=2.0, original_length=8192, before=inner)
    both = RopeScaling.linear(base=10_000, factor=8.0, original_length=2048)
    torch.testing.assert_close(inverse_frequencies(outer, 64)[0], inverse_frequencies(both, 64)[0])


@pytest.mark.parametrize(
    ("scaling", "head_dim", "words"),
    [
        (RopeScaling.base_change(10_000), 33, "head_dim is 33; .* must be even"),
        (
            RopeScaling(method="default", base=10_000, partial_rotary_factor=0.25),
            20,
            "partial_rotary_factor 0.25, so 5 turn",
        ),
        (STRETCHERS["ntk"], 2, "at least 4 rotated dimensions"),
        (
            RopeScaling.dynamic(base=10_000, factor=2.0, original_length=512),
            64,
            "dynamic rotates by the length of the sequence; give length",
        ),
    ],
    ids=["odd", "odd part", "two dimensions", "no length"],
)
def test_a_rotation_that_does_not_fit_the_heads_is_refused(scaling, head_dim, words):
    with pytest.raises(ValueError, match=words):
        inverse_frequencies(scaling, head_dim)


def test_factors_of_another_count_than_the_heads_are_refused():
    lists = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    scaling = RopeScaling(method="longrope", base=10_000, factor=2.0, original_length=512, **lists)
    Rotation(scaling, 32)
    with pytest.raises(ValueError, match=r"16 factors and 64 dimensions .* one a pair, 32"):
        Rotation(scaling, 64)
