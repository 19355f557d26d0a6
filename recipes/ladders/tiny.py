# SPDX-License-Identifier: Apache-2.0
"""A tiny ladder: 512 tokens from scratch, a base change to 2,048, YaRN to 8,192.

All values are ours, chosen so that two CPU cores train it in about two minutes. The later peaks are
lower than the first, since batches of two sequences, then one, are noisier.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K

BASE_2K = 40_000  # ours: the base of 512 tokens times the growth in length

TINY_LADDER = Ladder(
    name="tiny",
    source="ours",
    cards=("tiny",),
    data="Ours: the documents that `longhaul prepare` makes without a source.",
    ours=("All values, chosen so that two CPU cores train it in about two minutes.",),
    stages=(
        Stage(
            seq_length=512,
            rope=RopeScaling.base_change(10_000),
            tokens=240 * 4 * K,
            tokens_per_batch=4 * K,
            lr=Cosine(peak=6e-3),
            start="scratch",
        ),
        Stage(
            seq_length=2 * K,
            rope=RopeScaling.base_change(BASE_2K),
            tokens=48 * 4 * K,
            tokens_per_batch=4 * K,
            lr=Cosine(peak=1.5e-3),
        ),
        Stage(
            seq_length=8 * K,
            rope=RopeScaling.yarn(base=BASE_2K, factor=4.0, original_length=2 * K),
            tokens=16 * 8 * K,
            tokens_per_batch=8 * K,
            lr=Cosine(peak=1e-3),
        ),
    ),
)
