# SPDX-License-Identifier: Apache-2.0
"""NeMo's lengths 16K -> 64K -> 128K, with the training that its long-context recipes leave out.

Lengths: the long-context recipes of NeMo 2.7.3 (`nemo.collections.llm.recipes`), which set only
sequence length and parallelism, so the card keeps its own rotation. They exist for Llama 3 8B at
16K, 64K and 128K; for Llama 3 70B, Mixtral 8x7B, Nemotron 3 22B and Nemotron 4 15B at 16K and 64K;
for Mixtral 8x22B at 64K only. All train from scratch on mock data.

A first stage of 2K, usual when a model is trained from random weights, is left out: every card here
was trained at 4K or more.

Batch and schedule: ProLong's first stage (arXiv 2410.02660, table 9). A model whose own rotation
does not reach the length learns to use distant text from these tokens only; other ladders change
its rotation first.
"""

from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M

PROLONG_SCHEDULE = Cosine(peak=1e-5, final_ratio=0.1, warmup_ratio=0.1)
BUDGET = 500 * 4 * M  # ours

NEMO = Ladder(
    name="nemo",
    source="NeMo 2 long-context recipes (lengths); arXiv 2410.02660 (batch, schedule)",
    cards=(
        "llama3_8b",
        "llama3_70b",
        "mixtral_8x7b",
        "mixtral_8x22b",
        "nemotron3_22b",
        "nemotron4_15b",
        "llama31_8b",  # ours, from here on
        "llama31_70b",
        "llama31_405b",
        "llama32_1b",
        "llama32_3b",
        "mistral_nemo_12b",
    ),
    data="NeMo's recipes have mock data. Ours: ProLong's 64K mix, long documents and short ones.",
    ours=(
        "Batch and schedule of each stage: those of ProLong's first.",
        "2.1B tokens per stage: a tenth of ProLong's, enough to see the loss by position settle.",
        "The cards from llama31_8b on, whose own rotation reaches 128K; 128K for any but "
        "llama3_8b, and 16K for mixtral_8x22b: NeMo has no recipe for these.",
    ),
    departures=(
        "NeMo's recipes train from random weights; this ladder starts from the card's, and so "
        "without a stage of 2K, a length that each card was trained at.",
    ),
    stages=(
        Stage(
            seq_length=16 * K,
            rope="native",
            tokens=BUDGET,
            tokens_per_batch=4 * M,
            lr=PROLONG_SCHEDULE,
            start="card",
        ),
        Stage(
            seq_length=64 * K,
            rope="native",
            tokens=BUDGET,
            tokens_per_batch=4 * M,
            lr=PROLONG_SCHEDULE,
        ),
        Stage(
            seq_length=128 * K,
            rope="native",
            tokens=BUDGET,
            tokens_per_batch=4 * M,
            lr=PROLONG_SCHEDULE,
        ),
    ),
)
