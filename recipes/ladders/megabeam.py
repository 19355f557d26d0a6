# SPDX-License-Identifier: Apache-2.0
"""MegaBeam-Mistral-7B-512K (arXiv 2505.08651): 32K -> 300K -> 600K, then short sequences.

Stated: 1.2B tokens at 300K and 600K with a base of 25M, 0.18B at 600K with 75M, then about 0.2B
of 32K to 80K, for what had become worse at the ends of sequences; positions in fp32. Data: 70%
code, 10% papers, 15% web, 5% books. From Mistral-7B-Instruct-v0.2.

Not stated: the rate, the batch, and how the 1.2B divide; 0.64B and 0.56B are secondary sources'.
"""

from typing import Literal

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, Share
from recipes.spec.stage import Ladder, Linear, Stage
from recipes.spec.units import K

BATCH = 8 * 600 * K  # ours
MIX = Mix(
    shares=(
        Share(source="code", weight=0.70),
        Share(source="papers", weight=0.10),
        Share(source="web", weight=0.15),
        Share(source="books", weight=0.05),
    )
)


def _stage(
    seq_length: int,
    base: float,
    *,
    tokens: int,
    recovers: int | None = None,
    start: Literal["card", "previous"] = "previous",
) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(base),
        tokens=tokens,
        tokens_per_batch=BATCH,
        lr=Linear(peak=1e-5, final_ratio=1.0, warmup_ratio=0.05),  # ours
        documents="within",  # ours
        mix=MIX,
        recovers=recovers,
        start=start,
    )


MEGABEAM = Ladder(
    name="megabeam",
    source="arXiv 2505.08651",
    cards=("mistral_7b",),
    data="70% source code, 10% research papers, 15% web, 5% books, each document long.",
    starts_from="mistralai/Mistral-7B-Instruct-v0.2",
    ours=(
        "The rate, constant at 1e-05 after 5% of warm-up, batches of eight sequences of 600K, "
        "attention within documents and Adam's settings: none is stated.",
        "0.64B tokens at 300K and 0.56B at 600K, of the 1.2B that the source states for both.",
        "50K as the length of the short sequences, which are 32K to 80K long in the source.",
    ),
    departures=(
        "At 600K the base is 75M from the start, with the tokens of both: the source first trained "
        "0.56B there with 25M. Stages of a ladder have different lengths.",
        "Left out: the tuning on 22M tokens of synthetic questions that followed.",
    ),
    stages=(
        _stage(300 * K, 25e6, tokens=640_000_000, start="card"),
        _stage(600 * K, 75e6, tokens=740_000_000),
        _stage(50 * K, 75e6, tokens=200_000_000, recovers=600 * K),
    ),
)
