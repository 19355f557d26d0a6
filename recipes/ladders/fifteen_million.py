# SPDX-License-Identifier: Apache-2.0
"""Fifteen million tokens, shown by ALST (arXiv 2506.13996) to fit on four nodes.

Stated: Llama-3.1-8B-Instruct at 15M tokens on 32 H100, one sequence per step (tables 2 to 4;
run-h100-sp32-llama-8b.yml of snowflakedb/ArcticTraining, whose limit is 15,500,000). It measures
memory and speed and trains no model.

So the training is ours: Nemotron-UltraLong's single step (arXiv 2504.06214), YaRN over the 8,192
tokens that Llama 3.1's scaling starts from, with its ramp and its rate, and about its 1B tokens. A
step takes 7.5 hours there.

The length is a binary 15M, as everywhere here: 15,728,640 tokens, 1.5% above that limit. The source
shards parameters over the ranks, which is not possible with a tiled loss here. On its 32 GPUs ours
fits with TP 2 and a ring that takes one head at a time; eight nodes end the stage in ten days, so
the first of the two shipped recipes takes those.
"""

from recipes.ladders.ultralong import SCHEDULE, STARTS_FROM, one_step
from recipes.spec.stage import Ladder
from recipes.spec.units import M

STEPS = 64  # ours

FIFTEEN_MILLION = Ladder(
    name="fifteen_million",
    source="arXiv 2506.13996 (length, model, GPUs); arXiv 2504.06214 (training)",
    cards=("llama31_8b",),
    data="Ours: Nemotron-UltraLong's, long documents drawn more often, attention across documents.",
    starts_from=STARTS_FROM,
    ours=(
        "All of the training: Nemotron-UltraLong's rotation and rate, and 64 steps, its 1B tokens.",
        SCHEDULE,
    ),
    departures=(
        "The source's machine is four nodes of 8 H100 of 80 GB, and it shards parameters, which is "
        "not possible with a tiled loss here. By the planner 15,728,640 tokens fit there without "
        "(`llama31_8b_fifteen_million_15m_on_32xh100`); eight nodes end the stage in ten days.",
        "15M is binary, 15,728,640 tokens; the source's limit is 15,500,000.",
    ),
    stages=(one_step(15 * M, tokens=STEPS * 15 * M, tokens_per_batch=15 * M),),
)
