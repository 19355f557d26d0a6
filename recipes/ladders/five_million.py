# SPDX-License-Identifier: Apache-2.0
"""Five million tokens, shown by Untied Ulysses (arXiv 2602.21196) to fit on one node.

Stated: Llama 3 8B at 5,242,880 tokens on 8 H100, one sequence per step, by attention in chunks of
heads (abstract; run_all_8B.sh of togethercomputer/Untied-Ulysses). It measures memory and speed of
ten steps and trains no model.

So the training is ours: Nemotron-UltraLong's single step (arXiv 2504.06214), YaRN over the 8,192
tokens of Llama 3 with its ramp and its rate, and about its 1B tokens. One sequence is one batch,
and a step takes more than two hours on that node.

The source shards parameters over the node, which is not possible with a tiled loss here, and leaves
no headroom. On its machine 5,000K tokens fit with Adam on the host, which has not been tried on
GPUs (`longhaul plan llama3_8b --seq 5000K`); 5M lacks 0.05 GiB a GPU, so the shipped recipe is laid
out for one node of H200.
"""

from recipes.ladders.ultralong import SCHEDULE, one_step
from recipes.spec.stage import Ladder
from recipes.spec.units import M

STEPS = 200  # ours

FIVE_MILLION = Ladder(
    name="five_million",
    source="arXiv 2602.21196 (length, model, GPUs); arXiv 2504.06214 (training)",
    cards=("llama3_8b",),
    data="Ours: Nemotron-UltraLong's, long documents drawn more often, attention across documents.",
    ours=(
        "All of the training: Nemotron-UltraLong's rotation and rate, and 200 steps, the smallest "
        "multiple of 100 that has its 1B tokens.",
        SCHEDULE,
    ),
    departures=(
        "The source's machine is one node of 8 H100 of 80 GB. By the planner 5,120,000 tokens fit "
        "there with Adam on the host, and 5,242,880 lack 0.05 GiB per GPU: the source shards "
        "parameters, which is not possible with a tiled loss here. So the recipe takes one node "
        "of H200, or two of H100.",
    ),
    stages=(one_step(5 * M, tokens=STEPS * 5 * M, tokens_per_batch=5 * M),),
)
