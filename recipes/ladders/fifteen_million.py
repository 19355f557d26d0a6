# SPDX-License-Identifier: Apache-2.0
"""Fifteen million tokens on four nodes: what ALST (arXiv 2506.13996) shows to fit.

Stated: Llama-3.1-8B-Instruct at 15M tokens on 32 H100, one sequence per step (tables 2 to 4;
run-h100-sp32-llama-8b.yml of snowflakedb/ArcticTraining, whose limit is 15,500,000). It measures
memory and speed and trains no model.

So the training is ours: Nemotron-UltraLong's one step (arXiv 2504.06214), YaRN over the 8,192
tokens that Llama 3.1's scaling is of, with its ramp and its rate, and about its 1B tokens. A step
takes 7.5 hours there.

The length is 15M in binary as all of ours, 15,728,640 tokens, and so 1.5% above that limit: plan it
for your GPUs first.
"""

from recipes.ladders.ultralong import one_step
from recipes.stages import Ladder
from recipes.units import M

STEPS = 64  # ours: UltraLong's 1B tokens

FIFTEEN_MILLION = Ladder(
    name="fifteen_million",
    source="arXiv 2506.13996 (length, model, GPUs); arXiv 2504.06214 (training)",
    cards=("llama31_8b",),
    data="Ours: Nemotron-UltraLong's, long documents drawn more often, which see one another.",
    stages=(one_step(15 * M, tokens=STEPS * 15 * M, tokens_per_batch=15 * M),),
)
