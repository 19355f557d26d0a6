# SPDX-License-Identifier: Apache-2.0
"""MiniMax-01 (arXiv 2501.08313, table 6): 128K -> 512K -> 1M, with shares of document lengths.

Stated: lengths, bases, tokens, shares of documents below 32K, to 128K and above; in the last fifth
of each stage 10% questions on long contexts, weights that move by a line between stages.

Not stated: rate, batch and optimizer. The source's model has linear attention in seven of eight
layers.
"""

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, Share
from recipes.spec.stage import Ladder, Linear, Stage
from recipes.spec.units import K, M

QUESTIONS = 0.1
BATCH = 16 * M  # ours


def _stage(seq_length: int, base: float, *, tokens: int, short: float, medium: float) -> Stage:
    long = 1 - short - medium
    rows = [(short, 1, 32 * K), (medium, 32 * K, 128 * K), (long, 128 * K, None)]
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(base),
        tokens=tokens,
        tokens_per_batch=BATCH,
        lr=Linear(peak=1e-5, final_ratio=1.0, warmup_ratio=0.01),  # ours
        documents="within",  # ours
        mix=Mix(
            shares=(
                *(
                    Share(
                        source="text",
                        weight=weight,
                        end_weight=weight * (1 - QUESTIONS),
                        at_least=at_least,
                        below=below,
                    )
                    for weight, at_least, below in rows
                    if weight > 1e-9
                ),
                Share(source="long_context_questions", weight=0.0, end_weight=QUESTIONS),
            ),
        ),
        start="card" if seq_length == 128 * K else "previous",
    )


MINIMAX01 = Ladder(
    name="minimax01",
    source="arXiv 2501.08313, table 6",
    cards=("llama3_8b", "llama3_70b"),
    data=(
        "By length of document: at 128K 30% below 32K and 70% to 128K; at 512K 35%, 35% and 30% "
        "above; at 1M 30%, 30% and 40%. In the last fifth of a stage questions on long contexts "
        "grow to 10%."
    ),
    ours=(
        "Llama 3 in place of a model with linear attention in seven of eight layers.",
        "The rate, constant at 1e-05 after 1% of warm-up, batches of 16M tokens, attention within "
        "documents and Adam's settings: none is stated.",
        "Names of the two sources in the mix; the text is not divided by source.",
    ),
    departures=(
        "Weights of sources move by a line in the source from one stage to the next; here within "
        "the last fifth of each.",
    ),
    stages=(
        _stage(128 * K, 5e6, tokens=300_000_000_000, short=0.30, medium=0.70),
        _stage(512 * K, 10e6, tokens=32_000_000_000, short=0.35, medium=0.35),
        _stage(1 * M, 10e6, tokens=26_000_000_000, short=0.30, medium=0.30),
    ),
)
