# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-1M (arXiv 2501.15383): 32K -> 64K -> 128K -> 256K, the base raised to ten million.

Stated (section 3): five stages, 4K, 32K, 64K, 128K and 256K, at bases 10,000, then 1M, 1M, 5M and
10M. The first two are those of other Qwen2.5 models, and the source continues from an unpublished
intermediate version of the base models. The published base models have had the same two stages, so
the ladder has the last three. The models reach a million tokens by extrapolation, without training
at that length (section 5.1).

Not stated: tokens, batch, rate, optimizer, and whether attention crosses documents.
"""

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M

BASES = {64 * K: 1_000_000, 128 * K: 5_000_000, 256 * K: 10_000_000}


def _stage(seq_length: int, base: float) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(base),
        tokens=2_500 * 4 * M,  # ours
        tokens_per_batch=4 * M,  # ours
        lr=Cosine(peak=1e-5, final_ratio=0.1, warmup_ratio=0.1),  # ours
        documents="across",  # ours
        mix=Mix(long_from=seq_length, long_share=0.75),
        start="card" if seq_length == 64 * K else "previous",
    )


QWEN25_1M = Ladder(
    name="qwen25_1m",
    source="arXiv 2501.15383",
    cards=(
        "qwen25_7b",
        "qwen25_14b",
        "qwen25_0p5b",  # ours, from here on
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
        "mistral_7b",
    ),
    data=(
        "75% sequences of the stage's length, 25% shorter. Long texts of Common Crawl, arXiv, "
        "books and code repositories, with synthetic tasks in them: filling the middle, "
        "retrieving a paragraph by keyword or place, putting paragraphs back in order (section 3)."
    ),
    ours=(
        "Documents are packed by best fit; documents of the stage's length or more have 75% of the "
        "tokens.",
        "10.5B tokens per stage: half of ProLong's, since a context at most doubles.",
        "Batches of 4M tokens, the cosine from 1e-05 to 1e-06, its warm-up, Adam's beta2 and the "
        "weight decay: ProLong's.",
        "Attention across documents: the synthetic tasks join pieces of one sequence.",
        "The cards after qwen25_14b: like the source's, trained on 32K at base 1,000,000 without a "
        "window (mistral_7b is version 0.3, which has none).",
    ),
    departures=(
        "The source continues from an unpublished intermediate version of the base models; this "
        "ladder from the published weights, which have had its first two stages.",
    ),
    stages=tuple(_stage(*lengths) for lengths in BASES.items()),
)
