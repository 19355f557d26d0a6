# SPDX-License-Identifier: Apache-2.0
"""LongRoPE2 (arXiv 2502.20082): Llama 3 8B to 128K on 10B tokens, a divisor for each frequency.

Stated: 10B tokens in one epoch, 64 sequences of 128K per batch, 2e-5 and a cosine (section 4.1);
the original rotation up to 8,192 tokens (section 3.3); divisors found by search, between 16 and 32
from the critical pair on, and those of NTK scaling below it (section 3.2). The critical pair of
Llama 3 8B is 30, not the theoretical 35 (figure 4).

The divisors are not printed, only plotted (figure 4). Those here are the start of the paper's
search (algorithm 1) for the critical pair that it found, with 16 from there on, the smallest value
that it allows; the paper's are slightly larger. Search your own and train with them:

    longhaul rope search --run RUN --stage STAGE --target 131072 --out rope.json
    longhaul pretrain --factory llama3_8b_longrope2_128k --rope rope.json

In the source, sequences of short documents keep the original rotation, with attention within
documents; a stage here has one rotation and one policy, those of the long sequences.

Not stated: warm-up, the cosine's end, the optimizer, and the temperature, which here is LongRoPE's.
"""

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, Share
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K

PAIRS = 64  # head size 128
CRITICAL_PAIR = 30
FACTOR = 16

LONGROPE2 = Ladder(
    name="longrope2",
    source="arXiv 2502.20082",
    cards=("llama3_8b",),
    data=(
        "10B tokens: RedPajama-v1 4.5B, RedPajama-v2 2.5B and StarCoder 2B in documents of 8K to "
        "200K, FineWeb-Edu 1B in short ones; by length 3B up to 8K, 3B up to 100K, 4B up to 200K. "
        "Cut into 128K between begin and end tokens (section 4.1, table 1)."
    ),
    ours=(
        "The divisors, which the source does not print: the start of its search for the critical "
        "pair that it found (algorithm 1). `longhaul rope search` finds your own.",
        "The cosine's warm-up and end, Adam's beta2, the weight decay, and the temperature, which "
        "is LongRoPE's.",
    ),
    departures=(
        "In the source short documents keep the original rotation and attend only to themselves; "
        "a stage here has one rotation and one policy, those of the long sequences.",
    ),
    stages=(
        Stage(
            seq_length=128 * K,
            rope=RopeScaling(
                method="longrope",
                base=500_000,
                factor=FACTOR,
                original_length=8 * K,
                short_factor=[1.0] * PAIRS,
                long_factor=[  # ours
                    FACTOR ** min(1.0, pair / CRITICAL_PAIR) for pair in range(PAIRS)
                ],
            ),
            tokens=10_000_000_000,
            tokens_per_batch=64 * 128 * K,
            lr=Cosine(peak=2e-5, final_ratio=0.1, warmup_ratio=0.1),  # ours but for the peak
            documents="across",
            mix=Mix(
                shares=(
                    Share(source="redpajama_v1", weight=0.45, at_least=8 * K),
                    Share(source="redpajama_v2", weight=0.25, at_least=8 * K),
                    Share(source="starcoder", weight=0.20, at_least=8 * K),
                    Share(source="fineweb_edu", weight=0.10),
                ),
                packing="cut",
            ),
            start="card",
        ),
    ),
)
