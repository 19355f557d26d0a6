# SPDX-License-Identifier: Apache-2.0
"""K2-V2 70B (arXiv 2512.06201; LLM360/k2v2_train): 64K -> 128K -> 512K in one optimizer's run.

Stated (mid-train/k2v2_mid_train_stage2.sh to stage4.sh): lengths, bases, sequences per batch, which
are 13.1M tokens throughout, steps, a constant rate of 6e-6 without warm-up, weight decay 0.05,
betas 0.9 and 0.95, gradients clipped at 1, and that each stage loads the optimizer of the one
before. No scaling, only the base. The model has the shape of Llama 3 70B, its base of 500,000 and
its 8,192 tokens, and a vocabulary of 250K.

The first of the four stages trains 8,192 tokens, the context that the model has already; it is left
out. Its script ends at step 135,000, and the second stage's begins from its step 130,000.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Ladder, Linear, OptimizerState, Stage
from recipes.spec.units import K

BATCH = 200 * 64 * K


def _stage(
    seq_length: int, base: float, *, steps: int, optimizer: OptimizerState = "carried"
) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(base),
        tokens=steps * BATCH,
        tokens_per_batch=BATCH,
        lr=Linear(peak=6e-6, final_ratio=1.0, warmup_ratio=0.0),
        documents="across",
        adam_beta2=0.95,
        weight_decay=0.05,
        optimizer=optimizer,
        start="card" if seq_length == 64 * K else "previous",
    )


K2V2 = Ladder(
    name="k2v2",
    source="arXiv 2512.06201; LLM360/k2v2_train",
    cards=("llama3_70b", "llama3_8b"),
    data=(
        "TxT360-Midas, one subset for each stage, packed by best fit; its shares are in the data "
        "set's own files."
    ),
    ours=(
        "Llama 3, which has the shape, base and context of the source's model, in place of its "
        "weights.",
        "Attention across documents: the scripts set neither a mask nor positions that restart.",
    ),
    departures=(
        "The first stage here starts with a new optimizer, since published weights have no state "
        "of one; the source's loads that of its stage of 8,192 tokens.",
        "Left out: the stage of 8,192 tokens before it (135,000 steps of 1,600 sequences).",
    ),
    stages=(
        _stage(64 * K, 1_000_000, steps=45_000, optimizer="new"),
        _stage(128 * K, 10_000_000, steps=17_500),
        _stage(512 * K, 10_000_000, steps=10_000),
    ),
)
