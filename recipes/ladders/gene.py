# SPDX-License-Identifier: Apache-2.0
"""GeNE (10.18653/v1/2024.findings-acl.249): Llama 2 to 64K on sequences of 16K.

Stated (configs/ptrain_16k_64k.yaml of LhLi-QED/GeNE; length, batch and steps also on the paper's
page 4): sequences of 16K, 128 per batch (2 x 8 on 8 GPUs), 300 steps, 2e-5, a cosine after 100
steps of warm-up, a factor of 16 over 4,096 tokens, 3 rotations. Weight decay 0, beta2 0.999 and the
cosine's end at zero are the defaults of the Hugging Face trainer that it runs. The scale of the
rotation is drawn for each sequence (`custom_modules.rope.gene`).

Instruction tuning followed (configs/ift_16k_64k.yaml); it is not part of this ladder.
"""

from custom_modules.rope.gene import gene_rotation
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.train_short import Positions
from recipes.spec.units import K

GENE_64K = Ladder(
    name="gene_64k",
    source="10.18653/v1/2024.findings-acl.249; LhLi-QED/GeNE",
    cards=("llama2_7b", "llama2_13b"),  # ours: the 13B
    data=(
        "One document per sequence, cut at 16K (finetune.py). Ours: documents of 16K or more, "
        "since the repository does not say which documents it used."
    ),
    ours=("Llama 2 13B, whose rotation is the same.",),
    departures=("Left out: the instruction tuning that followed (configs/ift_16k_64k.yaml).",),
    stages=(
        Stage(
            seq_length=16 * K,
            rope=gene_rotation(base=10_000, factor=16, original_length=4 * K, head_dim=128),
            tokens=300 * 128 * 16 * K,
            tokens_per_batch=128 * 16 * K,
            lr=Cosine(peak=2e-5, final_ratio=0.0, warmup_ratio=100 / 300),
            documents="across",
            positions=Positions.gene(64 * K),
            adam_beta2=0.999,
            weight_decay=0.0,
            start="card",
        ),
    ),
)
