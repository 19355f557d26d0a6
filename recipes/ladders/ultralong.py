# SPDX-License-Identifier: Apache-2.0
"""Nemotron-UltraLong (arXiv 2504.06214): 128K -> 1M, 2M or 4M, in one stage each.

Stated: from Llama-3.1-8B-Instruct; 1B tokens in one epoch at a rate of 3e-5 (section 3.1, table 5);
YaRN with alpha 1 and beta 4, by 128, 256 and 512 (section 3.1), relative to 8,192 tokens at base
500,000, so it replaces Llama 3.1's scaling; attention across documents. One step is better than two
at the same cost (table 4). The 4M model had 150 iterations of 2 sequences (its card on Hugging
Face), so 1.26B tokens. Three ladders, since each starts from the card.

Not stated: the schedule of the rate, the optimizer, the batch of the other two, and the temperature
on attention, which here is YaRN's own. Instruction tuning on short text followed (section 3.2); it
is not part of a ladder.
"""

from custom_modules.rope.config import RopeScaling
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M

CARDS = ("llama31_8b", "llama31_70b")  # ours: the 70B
STARTS_FROM = "meta-llama/Llama-3.1-8B-Instruct"
SCHEDULE = (
    "The schedule of the rate, a cosine to a tenth of the peak after 10% of warm-up, Adam's beta2 "
    "and the weight decay: ProLong's. The temperature on attention: YaRN's own."
)
DATA = (
    "A pretraining corpus with long documents drawn more often, source by source (documents above "
    "8K; those below 4K less often), 1B tokens. Documents are joined by '<s>', not by the "
    "tokenizer's own begin and end, with attention across them (section 3.1)."
)


def one_step(seq_length: int, *, tokens: int, tokens_per_batch: int) -> Stage:
    """Return a stage that stretches 8,192 tokens of Llama 3 to the length, from the card."""
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling(
            method="yarn",
            base=500_000,
            factor=seq_length / (8 * K),
            original_length=8 * K,
            beta_slow=1.0,
            beta_fast=4.0,
        ),
        tokens=tokens,
        tokens_per_batch=tokens_per_batch,
        lr=Cosine(peak=3e-5, final_ratio=0.1, warmup_ratio=0.1),  # ours but for the peak
        documents="across",
        start="card",
    )


def _ladder(name: str, seq_length: int) -> Ladder:
    batch = 2 * 4 * M  # ours but for 4M
    return Ladder(
        name=name,
        source="arXiv 2504.06214; model cards of nvidia/Llama-3.1-8B-UltraLong-*-Instruct",
        cards=CARDS,
        data=DATA,
        starts_from=STARTS_FROM,
        ours=(
            SCHEDULE,
            "Tokens per batch, and so steps, at 1M and 2M: those that the card of the 4M model on "
            "Hugging Face states.",
            "Llama 3.1 70B, whose rotation is the same.",
        ),
        departures=("Left out: the instruction tuning on short text that followed (section 3.2).",),
        stages=(one_step(seq_length, tokens=150 * batch, tokens_per_batch=batch),),
    )


ULTRALONG_1M = _ladder("ultralong_1m", 1 * M)
ULTRALONG_2M = _ladder("ultralong_2m", 2 * M)
ULTRALONG_4M = _ladder("ultralong_4m", 4 * M)
