# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 (arXiv 2407.21783): 8K -> 128K in six stages.

Stated of the 405B: six stages from 8K to 128K, about 800B tokens, the next when short evaluations
have recovered and a needle is found at every depth (section 3.4.2); base 500,000, attention within
documents (section 3.2); 16M tokens per batch at 128K (table 4). The piecewise scaling by 8 of the
frequencies is not in the paper but in every published config.json of 3.1.

Not stated: the lengths between, the tokens of each, the rate, and when the scaling came in.

The published weights of 3.1 have been through this. The ladder starts from the 8K weights of Llama
3; on `llama31_405b`, whose 8K weights are unpublished, it is for planning, or for weights of yours.
"""

from custom_modules.rope_scaling import RopeScaling
from recipes.stages import Cosine, Ladder, Stage
from recipes.units import K, M

# ours: six lengths, none above twice the one before; a batch is 16M tokens, or the whole number of
# sequences below it that 16 ranks share
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
        rope=RopeScaling.llama3(),  # ours: from the first stage on, so that it changes once
        tokens=TOKENS // len(BATCHES),  # ours: equal shares
        tokens_per_batch=tokens_per_batch,
        lr=Cosine(peak=1e-5, final_ratio=0.1, warmup_ratio=0.01),  # ours: ProLong's peak and end
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
    stages=tuple(_stage(*lengths) for lengths in BATCHES.items()),
)
