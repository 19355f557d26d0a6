# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 (arXiv 2412.19437, section 4.3): 4K -> 32K -> 128K by YaRN, the same in both stages.

Stated: YaRN by 40 with beta 32 and 1 and a temperature of 0.1 ln(40) + 1, 1,000 steps at 32K with
1,920 sequences a batch and 1,000 at 128K with 480, a rate of 7.3e-6, the last of pretraining, in
both. From pretraining (section 4.2): betas 0.9 and 0.95, weight decay 0.1, clipping at 1.

The source rotates a part of keys that all heads share (multi-head latent attention), from 4,096
tokens at base 10,000, as Llama 2 does.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Ladder, Linear, Stage
from recipes.spec.units import K

BATCH = 1_920 * 32 * K


def _stage(seq_length: int) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.yarn(base=10_000, factor=40, original_length=4 * K),
        tokens=1_000 * BATCH,
        tokens_per_batch=BATCH,
        lr=Linear(peak=7.3e-6, final_ratio=1.0, warmup_ratio=0.0),
        documents="across",  # ours
        adam_beta2=0.95,
        weight_decay=0.1,
        optimizer="new" if seq_length == 32 * K else "carried",  # ours
        start="card" if seq_length == 32 * K else "previous",
    )


DEEPSEEK_V3 = Ladder(
    name="deepseek_v3",
    source="arXiv 2412.19437, section 4.3",
    cards=("llama2_7b", "llama2_13b", "llama2_70b"),
    data="Not stated.",
    ours=(
        "Llama 2, which has the source's base and context, in place of a model with multi-head "
        "latent attention.",
        "Attention across documents, as in the source's pretraining (section 4.1).",
        "The optimizer's state carried over into the second stage; the source does not say.",
    ),
    departures=(
        "The first stage here starts with a new optimizer, since published weights have no state "
        "of one.",
    ),
    stages=(_stage(32 * K), _stage(128 * K)),
)
