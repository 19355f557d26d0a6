# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from custom_modules.context_parallel_kind import ContextParallelKind
from recipes import laws

FITS = {
    "seq_length": 8192,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "layers": 32,
    "vocab": 128_256,
    "tp": 2,
    "cp": 4,
    "cp_kind": ContextParallelKind(kind="ulysses"),
    "pp": 2,
    "world_size": 64,
    "ranks_per_node": 8,
    "global_batch": 64,
    "micro_batch": 2,
}
RING = ContextParallelKind(kind="ring")
SCHEDULE = {"max_steps": 100, "lr": 1e-5}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tp": 1, "cp": 1, "pp": 1, "world_size": 1},
        {"tp": 1, "cp": 1, "pp": 1, "world_size": 1, "seq_length": 8191},
        {"tp": 1, "cp": 8, "world_size": 16},
        {"tp": 8, "cp": 1, "world_size": 16},
        {"global_batch": 8},
        {"kv_heads": 6, "cp": 8, "world_size": 128, "global_batch": 128, "cp_kind": RING},
        {"cp": 8, "world_size": 128, "global_batch": 128},
    ],
    ids=str,
)
def test_numbers_that_fit_break_no_law(change):
    assert list(laws.broken(**FITS | change)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 24}, "world size 24 .* TP 2 x CP 4 x PP 2 = 16 ranks"),
        ({"world_size": 8}, "world size 8 .* a multiple of 16"),
        ({"seq_length": 8196}, r"length 8,196 is not divisible by 2 x CP = 8, .* 8,192 would do"),
        (
            {"seq_length": 8188, "cp": 2, "tp": 4},
            r"length 8,188 over CP 2 is not divisible by TP 4, .*; 8,176 would do",
        ),
        ({"heads": 33}, "33 heads and 8 KV heads are not both divisible by TP 2; TP may be 1 only"),
        ({"kv_heads": 1}, "32 heads and 1 KV heads .* TP 2"),
        ({"tp": 16, "cp": 1, "world_size": 32}, "divisible by TP 16; TP may be 1, 2, 4 or 8"),
        (
            {"kv_heads": 6, "cp": 8, "world_size": 128, "global_batch": 128},
            "CP 8 as ulysses .* 16 heads and 3 KV heads on each TP rank.* For CP 8 take ring",
        ),
        (
            {"cp_kind": ContextParallelKind(kind="hybrid", ulysses=3)},
            "ulysses 3 does not divide CP 4; it may be 1, 2 or 4",
        ),
        (
            {"cp_kind": ContextParallelKind(kind="head_chunked", heads_per_stage=6)},
            "heads_per_stage 6 .* it may be 4, 8 or 16",
        ),
        ({"vocab": 128_257}, "vocabulary of 128,257 rows is not divisible by TP 2"),
        ({"layers": 33}, "33 layers are not divisible by PP 2; PP may be 1, 3, 11 or 33"),
        (
            {"global_batch": 4},
            "batch of 4 sequences .* micro-batch 2 x DP 4; .* multiple of 65,536 tokens",
        ),
        ({"micro_batch": 3}, "micro-batch 3 x DP 4"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_broken_law_is_one_sentence_with_the_value_and_what_would_do(change, words):
    (sentence,) = laws.broken(**FITS | change)
    assert re.search(words, sentence)


def test_every_broken_law_is_told_at_once():
    assert len(list(laws.broken(**FITS | {"vocab": 3, "layers": 3, "global_batch": 1}))) == 3


def test_a_schedule_that_fits_breaks_no_law():
    assert list(laws.broken_schedule(**SCHEDULE)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"lr": 0.0}, "the learning rate is 0;"),
        ({"lr": 3.0}, "the learning rate is 3; it must lie between 0 and 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_schedule_that_cannot_run_is_told(change, words):
    (sentence,) = laws.broken_schedule(**SCHEDULE | change)
    assert words in sentence


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "world_size", "micro_batch", "seq_length"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_a_sentence_not_a_crash(name, size):
    (sentence,) = laws.broken(**FITS | {name: size})
    assert f"{size}; it must be at least 1" in sentence
