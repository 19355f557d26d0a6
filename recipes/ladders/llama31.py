# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 (arXiv 2407.21783): 8K -> 128K in six stages.

Stated of the 405B: six stages from 8K to 128K, about 800B tokens; the next stage starts when short
evaluations have recovered and a needle is found at every depth (section 3.4.2); base 500,000,
attention within documents (section 3.2); 16M tokens per batch at 128K (table 4). The piecewise
scaling of the frequencies by 8 is not in the paper but in every published config.json of 3.1.

Not stated: the lengths between, the tokens of each stage, the rate, and when the scaling was added.
On the last 40M tokens the rate fell to zero, and checkpoints were averaged (section 3.4.3).

The published weights of 3.1 have had this training. The ladder starts from the 8K weights of Llama
3; on `llama31_405b`, whose 8K weights are unpublished, it is for planning or for your own weights.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M

# ours: the lengths between, and the batches of 48K and 96K, which 16 ranks share
BATCHES = {
    16 * K: 16 * M,
    32 * K: 16 * M,
    48 * K: 336 * 48 * K,
    64 * K: 16 * M,
    96 * K: 160 * 96 * K,
    128 * K: 16 * M,
}
TOKENS = 800_000_000_000


def _stage(seq_length: int, tokens_per_batch: int) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.llama3(),  # ours: from the first stage on
        tokens=TOKENS // len(BATCHES),  # ours: equal shares
        tokens_per_batch=tokens_per_batch,
        lr=Cosine(peak=1e-5, final_ratio=0.1, warmup_ratio=0.01),  # ours
        documents="within",
        start="card" if seq_length == 16 * K else "previous",
    )


LLAMA31 = Ladder(
    name="llama31",
    source="arXiv 2407.21783",
    cards=("llama31_405b", "llama3_8b", "llama3_70b"),
    data=(
        "The pretraining mix of Llama 3 on long sequences, a mask between documents "
        "(section 3.2); the mix of the long stages is not given."
    ),
    ours=(
        "The five lengths below 128K, none above twice the one before, and equal shares of the "
        "800B tokens.",
        "Batches of 16M tokens below 128K as well; at 48K and 96K, which do not divide it, the "
        "whole number of sequences below that 16 ranks share.",
        "The rate, a cosine from 1e-05 to 1e-06 after 1% of warm-up (ProLong's peak and end), "
        "Adam's beta2 of 0.95 and the weight decay of 0.1.",
        "The scaling of the frequencies from the first stage on, so that it changes once.",
    ),
    departures=(
        "The source started the next stage when short evaluations had recovered and a needle was "
        "found at every depth; here a stage ends with its tokens, and `longhaul evaluate` checks.",
        "Left out: the rate's fall to zero on the last 40M tokens, and the average of checkpoints "
        "(section 3.4.3).",
        "The 8K weights of the 405B were never published; those of 3.1 have had this training. "
        "The source says of the 8B and 70B only that their recipes are similar.",
    ),
    stages=tuple(_stage(*lengths) for lengths in BATCHES.items()),
)
