# SPDX-License-Identifier: Apache-2.0
import pytest

from recipes.planner.batch_size import Batch, data_ranks, even_batch, odd_part, solve
from recipes.spec.units import K, M

WHOLE = Batch(seq_length=64 * K, micro_batch=2, accumulation=4, dp=8)
GIVEN = {"tokens": 4 * M, "seq_length": 64 * K, "dp": 8, "accumulation": 4}


def test_a_batch_counts_its_sequences_and_tokens():
    assert (WHOLE.sequences, WHOLE.tokens) == (64, 4 * M)


@pytest.mark.parametrize("unknown", GIVEN)
def test_any_three_give_the_fourth(unknown):
    known = {name: value for name, value in GIVEN.items() if name != unknown}
    assert solve(**known, micro_batch=2) == WHOLE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"tokens": 4 * M, "seq_length": 64 * K, "dp": 6},
            "4,194,304 tokens per batch are not a multiple of sequence length 65,536 x DP 6 x "
            "micro-batch 1 = 393,216; nearest: 3,932,160 tokens (60 sequences, accumulation 10) "
            "or 4,325,376 tokens (66 sequences, accumulation 11)",
        ),
        (
            {"tokens": 4 * M, "seq_length": 8 * M, "dp": 1},
            "nearest: 8,388,608 tokens (1 sequence, accumulation 1)",
        ),
        (
            {"tokens": 100, "dp": 3, "accumulation": 4},
            "nearest: 96 tokens (sequence length 8) or 108 tokens (sequence length 9)",
        ),
    ],
)
def test_tokens_that_do_not_divide_are_told_the_nearest_batches(given, said):
    with pytest.raises(ValueError, match="nearest") as refused:
        solve(**given)
    assert said in str(refused.value)


@pytest.mark.parametrize("tokens", [4_000_000, 5_000_001])
def test_the_nearest_batches_are_batches(tokens):
    with pytest.raises(ValueError, match="nearest") as refused:
        solve(tokens=tokens, seq_length=48 * K, dp=7, micro_batch=2)
    told = str(refused.value).partition("nearest: ")[2].split(" or ")
    below, above = (int(words.partition(" ")[0].replace(",", "")) for words in told)
    assert below < tokens < above
    assert above - below == 48 * K * 7 * 2
    for whole in (below, above):
        assert solve(tokens=whole, seq_length=48 * K, dp=7, micro_batch=2).tokens == whole


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 4 * M}, "sequence length, DP, accumulation are missing"),
        (GIVEN, "leave one of them out"),
        ({**GIVEN, "accumulation": None, "dp": 0}, "DP is 0; it must be at least 1"),
        ({**GIVEN, "accumulation": None, "micro_batch": -1}, "micro-batch is -1"),
    ],
)
def test_numbers_that_are_no_question_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        solve(**given)


def test_data_ranks_are_the_whole_replicas_of_the_gpus():
    assert data_ranks(gpus=64, tp=2, cp=4) == 8


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"gpus": 60, "tp": 2, "cp": 4}, "TP 2 x CP 4 x PP 1 = 8; take 56 or 64"),
        ({"gpus": 4, "tp": 8}, "= 8; take 8"),
        ({"gpus": 8, "pp": 0}, "PP is 0; it must be at least 1"),
    ],
)
def test_gpus_that_hold_no_whole_replicas_are_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        data_ranks(**sizes)


@pytest.mark.parametrize(
    ("length", "gpus", "sequences"),
    [
        (64 * K, 8, 64),
        (12 * K, 64, 320),  # 341 are 11 x 31, which 64 GPUs hardly divide
        (48 * K, 64, 80),
        (100_000, 8, 40),
        (64 * K, 24, 60),
        (2 * M, 24, 3),  # two sequences would leave a third of the GPUs idle
        (3 * M, 8, 1),
        (12 * K, 1, 341),
        (180_000, 4, 24),  # 23 sequences: 22 would lose two more for the next factor of two
        (M, 800_000, 4),  # 3,125 sequences would be a batch of 3B tokens
    ],
)
def test_a_batch_is_one_that_many_data_ranks_divide(length, gpus, sequences):
    assert even_batch(4 * M, length, gpus) == sequences * length


@pytest.mark.parametrize("gpus", [*range(1, 41), 48, 64, 72, 96, 128, 192, 1000, 1024, 4096, 16384])
def test_an_even_batch_stays_the_same_when_it_is_evened_again(gpus):
    for sequences in range(1, 1500):
        even = even_batch(sequences, 1, gpus)
        assert even_batch(even, 1, gpus) == even
        if sequences >= odd_part(gpus) * 10:  # of few sequences the odd part alone takes more
            assert abs(even - sequences) <= 0.15 * sequences
