# SPDX-License-Identifier: Apache-2.0
"""Positions that skip, and GeNE's scales, against what their papers and repositories write down."""

from collections import Counter
from math import comb, pi

import pytest
import torch

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.gene import gene_rotation
from custom_modules.rope.rotary import inverse_frequencies
from custom_modules.rope.skipped_positions import gene_frequencies, gene_scale, longrecipe, pose

LLAMA_2 = {"base": 10_000, "factor": 16.0, "original_length": 4096, "head_dim": 128}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def starts(*sentences: int) -> torch.Tensor:
    """Return where sentences of these lengths start, bool [S]."""
    found = torch.zeros(sum(sentences), dtype=torch.bool)
    found[[sum(sentences[:n]) for n in range(len(sentences))]] = True
    return found


def runs(positions: torch.Tensor) -> list[list[int]]:
    """Return the runs of consecutive positions."""
    found: list[list[int]] = []
    for position in positions.tolist():
        if found and position == found[-1][-1] + 1:
            found[-1].append(position)
        else:
            found.append([position])
    return found


DRAWS = {
    "pose": lambda seed: pose(starts(24), generator(seed), target_length=80),
    "three chunks": lambda seed: pose(starts(24), generator(seed), target_length=80, chunks=3),
    "longrecipe": lambda seed: longrecipe(
        starts(5, 1, 7, 2, 9), generator(seed), target_length=80
    ),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_positions_begin_at_0_rise_and_stay_below_the_target(draw):
    highest = 0
    for seed in range(300):
        positions = draw(seed)
        assert (positions.dtype, positions.shape) == (torch.int64, (24,))
        assert positions[0] == 0
        assert (positions.diff() >= 1).all()
        highest = max(highest, int(positions[-1]))
    assert highest == 79


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_distance_up_to_the_target_is_met_in_some_sample(draw):
    met = set()
    for seed in range(600):
        positions = draw(seed)
        met |= set((positions[:, None] - positions[None, :]).flatten().tolist())
    assert set(range(1, 80)) <= met


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_same_generator_gives_the_same_positions_and_another_others(draw):
    assert torch.equal(draw(7), draw(7))
    assert any(not torch.equal(draw(7), draw(seed)) for seed in range(8, 12))


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_pose_skips_at_most_between_its_chunks(chunks):
    counts = Counter(
        len(runs(pose(starts(16), generator(seed), target_length=400, chunks=chunks)))
        for seed in range(200)
    )
    assert max(counts) == chunks
    assert min(counts) >= 1


def test_pose_of_three_tokens_in_five_places_is_drawn_as_the_paper_writes():
    """S 3, T 5, two chunks: l_0 of {1, 2} and u_1 of {0, 1, 2}, each pair with 1/6."""
    drawn = Counter(
        tuple(pose(starts(3), generator(seed), target_length=5).tolist()) for seed in range(6000)
    )
    expected = {
        (0, 1, 2): 2,  # u_1 is 0, whatever l_0
        (0, 2, 3): 1, (0, 3, 4): 1,  # l_0 is 1
        (0, 1, 3): 1, (0, 1, 4): 1,  # l_0 is 2
    }  # fmt: skip
    assert set(drawn) == set(expected)
    for positions, sixths in expected.items():
        assert drawn[positions] / 6000 == pytest.approx(sixths / 6, abs=0.02), positions


def test_one_chunk_or_no_room_leaves_positions_as_they_are():
    assert torch.equal(pose(starts(9), generator(0), target_length=50, chunks=1), torch.arange(9))
    assert torch.equal(pose(starts(9), generator(0), target_length=9), torch.arange(9))
    assert torch.equal(longrecipe(starts(4, 5), generator(0), target_length=9), torch.arange(9))


def test_longrecipe_keeps_sentences_whole_but_for_the_end_of_its_first_part():
    sentences = (6, 1, 8, 3, 12, 4)
    borders = {sum(sentences[:n]) for n in range(1, len(sentences))}
    torn = Counter()
    for seed in range(300):
        positions = longrecipe(starts(*sentences), generator(seed), target_length=200)
        skips = (positions.diff() > 1).nonzero().flatten() + 1
        inside = [int(at) for at in skips if int(at) not in borders]
        assert len(inside) <= 1
        if inside:
            assert inside[0] <= 17  # (S + 1) // 2
            assert torch.equal(positions[: inside[0]], torch.arange(inside[0]))
        torn[len(inside)] += 1
    assert set(torn) == {0, 1}


def test_longrecipe_draws_slots_as_its_released_code_does():
    """Two sentences of 1 and 2 tokens, T 6: two of five slots, the larger one less 1 is the skip.

    The first part has 1 to 2 tokens; of 2 it takes back the second sentence's first position.
    """
    drawn = Counter(
        tuple(longrecipe(starts(1, 2), generator(seed), target_length=6).tolist())
        for seed in range(12_000)
    )
    pairs = comb(5, 2)
    for skip in range(4):
        chance = (skip + 1) / pairs  # slot skip + 1 is the larger of skip + 1 pairs
        if skip == 0:
            assert drawn[(0, 1, 2)] / 12_000 == pytest.approx(chance, abs=0.015)
            continue
        for first in ((0, 1 + skip, 2 + skip), (0, 1, 2 + skip)):
            assert drawn[first] / 12_000 == pytest.approx(chance / 2, abs=0.015), first


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: pose(starts(9), generator(0), target_length=8), "target_length is 8 .* 9 tokens"),
        (lambda: longrecipe(starts(9), generator(0), target_length=8), "target_length is 8"),
        (lambda: pose(starts(2), generator(0), target_length=8, chunks=3), "chunks is 3 .* 2 tok"),
        (lambda: gene_scale(starts(2), generator(0), least=0, scales=4), "least is 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()


@pytest.mark.parametrize(
    ("scales", "chances"),
    [
        (1, {4: 1.0}),
        (4, {4: 0.25, 8: 0.25, 12: 0.25, 16: 0.25}),
        (6, {4: 0.25, 8: 0.125, 12: 0.125, 16: 0.125, 20: 0.125, 24: 0.25}),
    ],
)
def test_scales_have_the_chances_of_the_repository(scales, chances):
    drawn = Counter(
        gene_scale(starts(2), generator(seed), least=4, scales=scales) for seed in range(4000)
    )
    assert set(drawn) == set(chances)
    for scale, chance in chances.items():
        assert drawn[scale] / 4000 == pytest.approx(chance, abs=0.03), scale


def repository_frequencies(scale: float, *, base, original_length, head_dim, **_) -> list[float]:
    """Return gene_rope.py's InverseAngularVelocity pair by pair, in plain Python."""
    rotated = head_dim
    plain = [base ** (-2 * pair / rotated) for pair in range(rotated // 2)]
    beta = min(pair for pair, f in enumerate(plain) if f * original_length < 3 * 2 * pi)
    return [f / scale ** min(1.0, pair / beta) for pair, f in enumerate(plain)]


@pytest.mark.parametrize("scale", [1, 4, 8, 12, 16])
def test_frequencies_at_a_scale_are_those_of_the_repository(scale):
    found = gene_frequencies(gene_rotation(**LLAMA_2), 128, scale)
    expected = torch.tensor(repository_frequencies(scale, **LLAMA_2), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_model_that_turns_a_part_of_its_heads_has_a_divisor_for_each_pair_of_the_part(
    interleaved,
):
    model = {"partial_rotary_factor": 0.5, "interleaved": interleaved}
    rotation = gene_rotation(**LLAMA_2, **model)
    assert {name: getattr(rotation, name) for name in model} == model
    found, _ = inverse_frequencies(rotation, 128, 4096)
    expected = repository_frequencies(16, **LLAMA_2 | {"head_dim": 64})
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_head_whose_dimensions_do_not_pair_is_refused():
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.3, so 9 dimensions turn"):
        gene_rotation(**LLAMA_2 | {"head_dim": 32}, partial_rotary_factor=0.3)


def test_the_evaluated_rotation_is_the_one_at_full_scale_whatever_the_length():
    rotation = gene_rotation(**LLAMA_2)
    for length in (1, 4096, 4097, 65_536):
        frequencies, temperature = inverse_frequencies(rotation, 128, length)
        assert temperature == 1.0
        torch.testing.assert_close(
            frequencies, gene_frequencies(rotation, 128, 16), rtol=1e-13, atol=0
        )
    assert rotation.reach == 65_536


def test_a_rotation_that_is_not_of_gene_or_a_scale_beyond_it_is_refused():
    yarn = RopeScaling.yarn(base=10_000, factor=4.0, original_length=128)
    with pytest.raises(ValueError, match="rope is yarn; take"):
        gene_frequencies(yarn, 32, 2)
    with pytest.raises(ValueError, match="scale is 17; it lies between 1 and factor 16"):
        gene_frequencies(gene_rotation(**LLAMA_2), 128, 17)
    with pytest.raises(ValueError, match="all or none make fewer than 3 turns in 4 tokens"):
        gene_rotation(base=10_000, factor=4.0, original_length=4, head_dim=32)


def test_a_model_turns_each_sequence_at_the_scale_that_is_drawn_for_it(megatron_rank):
    from tests.custom_modules.support import llamas

    def rotation(factor: float) -> RopeScaling:
        return gene_rotation(base=10_000, factor=factor, original_length=32, head_dim=4)

    weights = llamas.megatron_weights(llamas.made_up_weights())
    tokens = torch.randint(0, llamas.VOCAB, (2, 17), generator=generator(1))
    positions = torch.arange(16).repeat(2, 1)

    def losses(model, rows: slice, **given) -> torch.Tensor:
        inputs, labels = tokens[rows, :-1], tokens[rows, 1:]
        return model(inputs, positions[rows], None, labels=labels, **given).detach()

    drawn = llamas.ours(rotation(8.0), weights, torch.float64)
    scales = torch.tensor([2.0, 8.0], dtype=torch.float64)
    found = losses(drawn, slice(0, 2), rope_scale=scales)
    for row, scale in enumerate((2.0, 8.0)):
        fixed = llamas.ours(rotation(scale), weights, torch.float64)
        expected = losses(fixed, slice(row, row + 1))
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-9, atol=1e-9)
    own = losses(drawn, slice(0, 2))
    assert (found[0] - own[0]).abs().max() > 1e-3
    torch.testing.assert_close(found[1], own[1], rtol=1e-9, atol=1e-9)
