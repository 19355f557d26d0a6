# SPDX-License-Identifier: Apache-2.0
"""LongRecipe (arXiv 2409.00509): Llama 3 8B to 128K on sequences of 30% of the length.

Stated (appendix A, table 4): samples of 38.4K for 128K, 96 of them per batch, 104 steps, 384M
tokens, 5e-5; "dynamic NTK" by 16, which comes to base 131.5M, that of 131,072 tokens. The rate is
constant and without warm-up, weight decay 0.1, betas 0.9 and 0.999 (zero3_offload.json of
zhiyuanhubj/LongRecipe).

Sentences are chosen as in the released code: those with a digit, and others with a probability of
one half. The paper's `impactful` ones need an analysis of the store first (docs/positions.md, which
also describes the second and third phase: a replay of pretraining data, and the mean with the
original model).

The source starts from Llama-3-8B-Instruct. The table has no Llama 3 70B, and other bases for Qwen2
and Mistral, so there is one card.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.train_short import Positions
from recipes.spec.units import K

LONGRECIPE_128K = Ladder(
    name="longrecipe_128k",
    source="arXiv 2409.00509; zhiyuanhubj/LongRecipe",
    cards=("llama3_8b",),
    data=(
        "10,000 texts of 128K tokens from SlimPajama with long documents drawn more often, domain "
        "by domain (Fu et al., arXiv 2402.10171); section 5.2. A text has the target length, and "
        "some of its sentences make a sample."
    ),
    starts_from="meta-llama/Meta-Llama-3-8B-Instruct",
    departures=(
        "Sentences with a digit are kept, others with a probability of one half, as in the "
        "released code; the paper's `impactful` ones need an analysis of your store "
        "(docs/positions.md).",
        "Left out: the second and third phase, a replay of pretraining data and the mean with the "
        "original model (docs/positions.md).",
    ),
    stages=(
        Stage(
            seq_length=38_400,
            rope=RopeScaling.base_change(131_500_000),
            tokens=104 * 96 * 38_400,
            tokens_per_batch=96 * 38_400,
            lr=Cosine(peak=5e-5, final_ratio=1.0, warmup_ratio=0.0),
            documents="across",
            positions=Positions.longrecipe(128 * K, sentences="digits", keep_others=0.5),
            adam_beta2=0.999,
            weight_decay=0.1,
            start="card",
        ),
    ),
)
