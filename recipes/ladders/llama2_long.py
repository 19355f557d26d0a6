# SPDX-License-Identifier: Apache-2.0
"""Llama 2 Long (arXiv 2309.16039): 4K -> 32K for 7B and 13B, 4K -> 16K for 34B and 70B.

Stated: lengths by size (section 1), 400B tokens in 100,000 steps, as many tokens per batch as
Llama 2 (which is 4M, arXiv 2307.09288, section 2.2), a cosine with 2,000 steps of warm-up, peaks of
2e-5 and 1e-5 (section 2.1), base 500,000 in place of 10,000 (sections 2.1, 4.1). Two ladders, since
sizes differ in length and rate; the 34B was never published.

Not stated: where the cosine ends, the optimizer, and whether attention crosses documents. A batch
of 4M is binary here, so 100,000 steps are 419B tokens.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M

STEPS = 100_000
DATA = (
    "Llama 2's pretraining mix with more long texts, their share raised (section 2.1); shares and "
    "separators are not given. Quality mattered more than length (section 4.2)."
)
OURS = (
    "The cosine's end, a tenth of the peak, Adam's beta2 of 0.95 and the weight decay of 0.1: "
    "Llama 2's own (arXiv 2307.09288, section 2.2).",
    "Attention across documents: masks between them came with Llama 3.",
)
DEPARTURES = ("A batch is 4M tokens in binary, so that 100,000 steps are 419B tokens, not 400B.",)


def _schedule(peak: float) -> Cosine:
    return Cosine(peak=peak, final_ratio=0.1, warmup_ratio=2_000 / STEPS)  # ours: the end


def _stage(seq_length: int, lr: Cosine) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(500_000),
        tokens=STEPS * 4 * M,
        tokens_per_batch=4 * M,
        lr=lr,
        documents="across",  # ours
        start="card",
    )


LLAMA2_LONG_32K = Ladder(
    name="llama2_long_32k",
    source="arXiv 2309.16039 (7B and 13B)",
    cards=("llama2_7b", "llama2_13b"),
    data=DATA,
    ours=OURS,
    departures=DEPARTURES,
    stages=(_stage(32 * K, _schedule(2e-5)),),
)

LLAMA2_LONG_16K = Ladder(
    name="llama2_long_16k",
    source="arXiv 2309.16039 (34B and 70B)",
    cards=("llama2_70b",),
    data=DATA,
    ours=OURS,
    departures=DEPARTURES,
    stages=(_stage(16 * K, _schedule(1e-5)),),
)
