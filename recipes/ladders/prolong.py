# SPDX-License-Identifier: Apache-2.0
"""ProLong (arXiv 2410.02660): two stages, the base raised before each.

Stated: lengths, 20B tokens and base of each stage, batches of 4M and 8M, AdamW (weight decay 0.1,
betas 0.9 and 0.95), peak 1e-5 with 10% of warm-up and a cosine to 1e-6 in each stage, attention
within documents, from Llama-3-8B-Instruct (table 9; steps in train_64K.sh and train_512K.sh of
princeton-nlp/ProLong). The paper's K, M and B are binary (its footnote 2), as they are here.

Paper and script differ on the second stage's peak, 1e-5 and 5e-6; neither says which was used for
the published model. Here it is the paper's.

The script carries the optimizer's state over to the second stage. The source starts from the
instruct model: import its weights with `longhaul import` in place of the card's.
"""

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, Share
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M

SCHEDULE = Cosine(peak=1e-5, final_ratio=0.1, warmup_ratio=0.1)

SHORT = {
    "fineweb": 0.10, "fineweb_edu": 0.10, "stackexchange": 0.04, "wikipedia": 0.04, "tulu": 0.03,
    "arxiv": 0.03, "openwebmath": 0.03, "textbooks": 0.03,
}  # fmt: skip


def _mix(*long: Share) -> Mix:
    short = (Share(source=name, weight=weight) for name, weight in SHORT.items())
    return Mix(shares=(*long, *short))


PROLONG = Ladder(
    name="prolong",
    source="arXiv 2410.02660; princeton-nlp/ProLong",
    cards=("llama3_8b",),
    data=(
        "64K: 30% code repositories and 30% books of 64K tokens or more, 40% short: FineWeb and "
        "FineWeb-Edu 10% each, StackExchange and Wikipedia 4% each, Tulu-v2, arXiv, OpenWebMath "
        "and textbooks 3% each, packed to 64K. 512K: of the code half, of the books a sixth in "
        "documents of 512K, the rest of 64K (train_64K.sh, train_512K.sh)."
    ),
    starts_from="meta-llama/Meta-Llama-3-8B-Instruct",
    ours=(
        "The second stage's peak of 1e-05, as in the paper; the script has 5e-06, and neither says "
        "which was used for the published model.",
        "Documents are packed by best fit; the source packs in order.",
    ),
    stages=(
        Stage(
            seq_length=64 * K,
            rope=RopeScaling.base_change(8_000_000),
            tokens=5_000 * 4 * M,
            tokens_per_batch=4 * M,
            lr=SCHEDULE,
            documents="within",
            mix=_mix(
                Share(source="code", weight=0.30, at_least=64 * K),
                Share(source="books", weight=0.30, at_least=64 * K),
            ),
            adam_beta2=0.95,
            weight_decay=0.1,
            start="card",
        ),
        Stage(
            seq_length=512 * K,
            rope=RopeScaling.base_change(128_000_000),
            tokens=2_500 * 8 * M,
            tokens_per_batch=8 * M,
            lr=SCHEDULE,
            documents="within",
            mix=_mix(
                Share(source="code", weight=0.15, at_least=512 * K),
                Share(source="code", weight=0.15, at_least=64 * K, below=512 * K),
                Share(source="books", weight=0.05, at_least=512 * K),
                Share(source="books", weight=0.25, at_least=64 * K, below=512 * K),
            ),
            adam_beta2=0.95,
            weight_decay=0.1,
            optimizer="carried",
        ),
    ),
)
