# SPDX-License-Identifier: Apache-2.0
"""NeMo's lengths 16K -> 64K -> 128K, with what its long-context recipes leave out.

Lengths and rotation: the long-context recipes of NeMo 2 (`*_16k`, `*_64k`, `*_128k`), which set
nothing but sequence length and parallelism, so the card keeps its own rotation. The batch of 4M
tokens and the schedule are ProLong's (arXiv 2410.02660, train_64K.sh).
"""

from recipes.stages import Cosine, Ladder, Stage
from recipes.units import K, M

PROLONG_SCHEDULE = Cosine(peak=1e-5, final_ratio=0.1, warmup_ratio=0.1)
BUDGET = 500 * 4 * M  # ours: enough to see the by-position loss settle, a tenth of ProLong's

LLAMA_128K = Ladder(
    name="nemo",
    source="NeMo 2 long-context recipes (lengths); arXiv 2410.02660 (batch, schedule)",
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
