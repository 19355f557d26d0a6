# SPDX-License-Identifier: Apache-2.0
"""LWM-Text (arXiv 2402.08268): 32K -> 128K -> 256K -> 512K -> 1M on Llama 2 7B.

Stated (table 11): lengths, bases, 4M tokens per batch, steps, warm-up, a constant rate of 4e-5. The
table's totals (4.8B, 12B, 12B, 3B, 1.8B) are steps times 4,000,000; here a batch is 4M in binary,
5% more. The base of 128K is also in scripts/run_eval_needle.sh of LargeWorldModel/LWM, that of 1M
in the model's config.json. Weight decay 0.1 is from the example in scripts/run_train_text.sh, whose
other values differ from the table.

Not stated: the betas of Adam, and whether attention crosses documents. Chat tuning and video follow
in the source; they are not part of this ladder.
"""

from typing import Literal

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, Share
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M


def _stage(
    seq_length: int,
    base: float,
    *,
    steps: int,
    warmup: int,
    start: Literal["card", "previous"] = "previous",
    books: tuple[int, int | None],
) -> Stage:
    at_least, below = books
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.base_change(base),
        tokens=steps * 4 * M,
        tokens_per_batch=4 * M,
        lr=Cosine(peak=4e-5, final_ratio=1.0, warmup_ratio=warmup / steps),
        documents="across",  # ours
        mix=Mix(
            shares=(Share(source="books", weight=1.0, at_least=at_least, below=below),),
            packing="cut",
        ),
        weight_decay=0.1,
        start=start,
    )


LWM = Ladder(
    name="lwm",
    source="arXiv 2402.08268, table 11",
    cards=("llama2_7b",),
    data=(
        "Books3, by length of the book in tokens: 10K-100K for 32K, 100K-200K for 128K, 200K-500K "
        "for 256K, 500K-1M for 512K, above 1M for 1M (figure 3)."
    ),
    ours=(
        "Bounds on the lengths of books are the nearest powers of two.",
        "Attention across documents: masked packing is described only for chat and video.",
        "Adam's beta2 of 0.95; the weight decay of 0.1 is from an example script of the source, "
        "not from its table.",
    ),
    departures=(
        "A batch is 4M tokens in binary, 5% more than in the totals of the table.",
        "Left out: the chat tuning and the video stages that followed.",
    ),
    stages=(
        _stage(32 * K, 1_000_000, steps=1_200, warmup=100, start="card", books=(8 * K, 128 * K)),
        _stage(128 * K, 10_000_000, steps=3_000, warmup=200, books=(128 * K, 256 * K)),
        _stage(256 * K, 10_000_000, steps=3_000, warmup=200, books=(256 * K, 512 * K)),
        _stage(512 * K, 25_000_000, steps=720, warmup=50, books=(512 * K, 1 * M)),
        _stage(1 * M, 50_000_000, steps=450, warmup=25, books=(1 * M, None)),
    ),
)
