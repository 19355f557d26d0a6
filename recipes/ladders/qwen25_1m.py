# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-1M (arXiv 2501.15383): 32K -> 64K -> 128K -> 256K, the base raised to ten million.

Stated (section 3): five stages, 4K, 32K, 64K, 128K and 256K, at bases 10,000, then 1M, 1M, 5M and
10M. The first two are those of the Qwen2.5 base models, whose published weights have been through
them, so the ladder has the last three. The models reach a million tokens by extrapolation, without
training on them (section 5.1).

Not stated: tokens, batch, rate, optimizer, and whether documents see one another.
"""

from custom_modules.rope_scaling import RopeScaling
from recipes.stages import Cosine, Ladder, Stage
from recipes.units import K, M

BASES = {64 * K: 1_000_000, 128 * K: 5_000_000, 256 * K: 10_000_000}


def _stage(seq_length: int, base: float) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(base),
        tokens=2_500 * 4 * M,  # ours: half of what ProLong gives a stage; it doubles at most here
        tokens_per_batch=4 * M,  # ours: ProLong's
        lr=Cosine(peak=1e-5, final_ratio=0.1, warmup_ratio=0.1),  # ours: ProLong's
        documents="across",  # ours: synthetic tasks join pieces of one sequence
        start="card" if seq_length == 64 * K else "previous",
    )


QWEN25_1M = Ladder(
    name="qwen25_1m",
    source="arXiv 2501.15383",
    cards=(
        "qwen25_7b",
        "qwen25_14b",
        "qwen25_0p5b",  # ours, from here on: the same context and base before extension
        "qwen25_1p5b",
        "qwen25_3b",
        "qwen25_32b",
        "qwen25_72b",
        "qwen3_0p6b",
        "qwen3_1p7b",
        "qwen3_4b",
        "qwen3_8b",
        "qwen3_14b",
        "qwen3_32b",
        "qwen3_30b_a3b",
    ),
    data=(
        "75% sequences of the stage's length, 25% shorter. Long texts of Common Crawl, arXiv, "
        "books and code repositories, with synthetic tasks in them: filling the middle, "
        "retrieving a paragraph by keyword or place, putting paragraphs back in order (section 3)."
    ),
    stages=tuple(_stage(*lengths) for lengths in BASES.items()),
)
