# SPDX-License-Identifier: Apache-2.0
"""YaRN (arXiv 2309.00071): Llama 2 to 64K by a factor of 16, then to 128K by 32.

Stated (section 4.1): both factors are of Llama 2's 4,096 tokens; 400 steps, then 200 more; 64
sequences of 64K per batch; 2e-5 after 20 steps of warm-up, no weight decay, betas 0.9 and 0.95.
Warm-up in both and a line down to zero: finetune.py, train.sh and deepspeed/zero3.json of
jquesnelle/yarn.

For lack of compute the source trained the factor of 32 on sequences of 64K too, and found that it
still reaches 128K. Here the second stage has half as many sequences of 128K, since the stages of a
ladder are named by their length. To train it as published, run the 64K recipe again with
`--rope yarn:factor=32,base=10000,original_length=4096`, 200 steps and the first run's checkpoint as
`resume.start`.

Llama 2 70B (a factor of 8, sequences of 8K) and Mistral (a window) have their own rows in train.sh
and are not in this ladder.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Ladder, Linear, Stage
from recipes.spec.units import K

YARN = Ladder(
    name="yarn",
    source="arXiv 2309.00071; jquesnelle/yarn",
    cards=("llama2_7b", "llama2_13b"),
    data=(
        "PG-19, books cut into segments of 64K tokens, each between the begin and end tokens "
        "(section 4.1); attention over the whole segment."
    ),
    departures=(
        "The source trained the factor of 32 on sequences of 64K too, for lack of compute; here "
        "they are of 128K, half as many a batch. As published: the 64K recipe with `--rope "
        "yarn:factor=32,base=10000,original_length=4096`, 200 steps, and the first run's "
        "checkpoint as resume.start.",
    ),
    stages=(
        Stage(
            seq_length=64 * K,
            rope=RopeScaling.yarn(base=10_000, factor=16, original_length=4 * K),
            tokens=400 * 64 * 64 * K,
            tokens_per_batch=64 * 64 * K,
            lr=Linear(peak=2e-5, final_ratio=0.0, warmup_ratio=20 / 400),
            documents="across",
            adam_beta2=0.95,
            weight_decay=0.0,
            start="card",
        ),
        Stage(
            seq_length=128 * K,  # 64K in the source
            rope=RopeScaling.yarn(base=10_000, factor=32, original_length=4 * K),
            tokens=200 * 64 * 64 * K,
            tokens_per_batch=64 * 64 * K,
            lr=Linear(peak=2e-5, final_ratio=0.0, warmup_ratio=20 / 200),
            documents="across",
            adam_beta2=0.95,
            weight_decay=0.0,
        ),
    ),
)
