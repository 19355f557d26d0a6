# SPDX-License-Identifier: Apache-2.0
"""SmolLM3 (huggingface/smollm, text/pretraining/smollm3): 4K -> 32K -> 64K.

Stated (long_context_4k_to_32k.yaml, long_context_32k_to_64.yaml): lengths, bases, 72 and 36
sequences a batch (12 data ranks, 6 and 3 steps of accumulation), steps, a peak of 2e-5 after 1,000
steps and a cosine to 0, weight decay 0.1, beta2 0.95, clipping at 1, attention within documents.
The second file starts a new optimizer; the first says `load_optimizer: true`, as a run that is
resumed does. The model's announcement gives a base of 1.5M at 32K, the file 2M.

Every fourth layer of the source's model has no rotation. Of the cards the first is that model
before its extension.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K

BATCH = 72 * 32 * K


def _stage(seq_length: int, base: float, *, steps: int) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(base),
        tokens=steps * BATCH,
        tokens_per_batch=BATCH,
        lr=Cosine(peak=2e-5, final_ratio=0.0, warmup_ratio=1_000 / steps),
        documents="within",
        adam_beta2=0.95,
        weight_decay=0.1,
        start="card" if seq_length == 32 * K else "previous",
    )


SMOLLM3 = Ladder(
    name="smollm3",
    source="huggingface/smollm, text/pretraining/smollm3",
    cards=("smollm3_4k_3b", "smollm2_1p7b", "smollm2_360m", "smollm2_135m"),
    data=(
        "The mix of the last stage of pretraining; the source found that more long documents than "
        "it has did not help."
    ),
    ours=(
        "With SmolLM2, the source's models before, all layers rotate; of SmolLM3 every fourth does "
        "not.",
        "A new optimizer in the first stage: published weights have no state of one.",
    ),
    departures=(
        "The announcement of the model gives a base of 1.5M at 32K; here it is that of the file.",
        "Left out: YaRN by 2 in inference, to 128K.",
    ),
    stages=(_stage(32 * K, 2e6, steps=20_000), _stage(64 * K, 5e6, steps=22_000)),
)
