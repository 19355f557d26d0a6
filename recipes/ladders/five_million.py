# SPDX-License-Identifier: Apache-2.0
"""Five million tokens on one node: what Untied Ulysses (arXiv 2602.21196) shows to fit.

Stated: Llama 3 8B at 5,242,880 tokens on 8 H100, one sequence per step, by attention in chunks of
heads (abstract; run_all_8B.sh of togethercomputer/Untied-Ulysses). It measures memory and speed of
ten steps and trains no model.

So the training is ours: Nemotron-UltraLong's one step (arXiv 2504.06214), YaRN over the 8,192
tokens of Llama 3 with its ramp and its rate, and about its 1B tokens. One sequence is one batch, a
step of more than two hours on that node: the schedule of a long stage, for whom it is worth it.
"""

from recipes.ladders.ultralong import one_step
from recipes.stages import Ladder
from recipes.units import M

STEPS = 200  # ours: the least whole hundred with UltraLong's 1B tokens

FIVE_MILLION = Ladder(
    name="five_million",
    source="arXiv 2602.21196 (length, model, GPUs); arXiv 2504.06214 (training)",
    cards=("llama3_8b",),
    data="Ours: Nemotron-UltraLong's, long documents drawn more often, which see one another.",
    stages=(one_step(5 * M, tokens=STEPS * 5 * M, tokens_per_batch=5 * M),),
)
