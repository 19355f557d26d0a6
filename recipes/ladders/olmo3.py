# SPDX-License-Identifier: Apache-2.0
"""Olmo 3 (arXiv 2512.13961; allenai/OLMo-core): 8K -> 64K in one stage, by YaRN.

Stated (src/scripts/official/OLMo3/OLMo-3-1025-*-long-context.py): YaRN by 8 from 8,192 tokens with
beta 32 and 1, 50B tokens of 4.2M a batch for 7B and 100B of 8.4M for 32B, a rate of 2.0712e-4 that
falls to 0 by a line after 200 steps, weight decay 0.1, betas 0.9 and 0.95, clipping at 1, attention
within documents, the optimizer of the stage before. The base is 500,000, as Llama 3's.

The source's YaRN is on its full-attention layers alone; three of four layers have a window, and
plain RoPE. Of the cards the first is the source's own model before its extension.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Ladder, Linear, Stage
from recipes.spec.units import K, M


def _ladder(size: str, other: str, *, tokens: int, batch: int, last: str) -> Ladder:
    steps = round(tokens / batch)
    return Ladder(
        name=f"olmo3_{size}",
        source="arXiv 2512.13961; allenai/OLMo-core, src/scripts/official/OLMo3",
        cards=(f"olmo3_8k_{size}", other),
        data="Dolma 3 Longmino: 34% long documents, 66% of the mix of mid-training.",
        ours=(
            "With Llama 3, which has the source's base and context, YaRN is on all layers; of "
            "Olmo 3 three of four layers have a window, and YaRN is on the others alone.",
        ),
        departures=(
            "A new optimizer, since published weights have no state of one; the source carries "
            "that of mid-training over.",
            f"Left out: a z-loss of 1e-5, no weight decay on embeddings{last}.",
        ),
        stages=(
            Stage(
                seq_length=64 * K,
                rope=RopeScaling.yarn(base=500_000, factor=8, original_length=8 * K),
                tokens=tokens,
                tokens_per_batch=batch,
                lr=Linear(peak=2.0712e-4, final_ratio=0.0, warmup_ratio=200 / steps),
                documents="within",
                adam_beta2=0.95,
                weight_decay=0.1,
                start="card",
            ),
        ),
    )


OLMO3_7B = _ladder("7b", "llama3_8b", tokens=50_000_000_000, batch=4 * M, last="")
OLMO3_32B = _ladder(
    "32b",
    "llama3_70b",
    tokens=100_000_000_000,
    batch=8 * M,
    last=", and the average of the last three checkpoints (`longhaul checkpoint average`)",
)
