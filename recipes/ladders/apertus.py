# SPDX-License-Identifier: Apache-2.0
"""Apertus v1 (arXiv 2509.14233, section 2.5) and 1.5, both of swiss-ai/pretrain-code.

Every stage has Llama 3's scaling from 8,192 tokens, and a base that grows with the length.

| v1 | base | 8B: steps of 8.39M tokens | 70B: steps of 16.8M tokens |
| --- | --- | --- | --- |
| 8K | 1M | 9,350 | 4,800 |
| 16K | 2M | 6,930 | 3,600 |
| 32K | 4M | 7,000 | 3,580 |
| 64K | 12M (70B: 8M) | 3,480 | 1,742 |

Stated of v1 (long_context/training_scripts): the table, constant rates of 1.1e-5 after 150 steps of
warm-up (8B) and 1e-6 after 75 (70B), weight decay 0.1, beta2 0.999, clipping at 0.1, AdEMAMix as
the optimizer, started anew at each stage (`--finetune`). Documents are apart up to 32K, not at 64K.

Stated of 1.5 (long-context/8b and 70b at commit fa7c0a1): bases 2M and then 4M, steps as below, the
rate of v1's 8B after 300 steps, and for the 70B 2e-6 after 100 steps (none at 32K), the optimizer
anew, best-fit packing with at most as many documents in a sequence as thousands of tokens. Its
scripts set a factor of 16 at 128K and 32 at 256K, and say that Megatron ignored it: both were
trained with 8. `apertus15_*` has the factors that the authors recommend, `apertus15_*_as_trained`
those that the published models have.
"""

from collections.abc import Mapping

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix, Share
from recipes.spec.stage import DocumentPolicy, Ladder, Linear, Stage
from recipes.spec.units import K, M

MODEL = (
    "The card: Apertus has another activation (xIELU) and norms on queries and keys, which are not "
    "trained here; Llama 3 has its shape of attention, and the scaling begins at its 8,192 tokens."
)
OPTIMIZER = "The source's optimizer is AdEMAMix, with gradients clipped at 0.1; here Adam, at 1."
RATES = {"8b": 1.1e-5, "70b": 1e-6}


def _stage(
    seq_length: int,
    *,
    base: float,
    factor: float,
    steps: int,
    batch: int,
    rate: float,
    warmup: int,
    documents: DocumentPolicy,
    mix: Mix | None,
    first: int,
) -> Stage:
    return Stage(
        seq_length=seq_length,
        rope=RopeScaling.llama3(base=base, factor=factor, original_length=8 * K),
        tokens=steps * batch,
        tokens_per_batch=batch,
        lr=Linear(peak=rate, final_ratio=1.0, warmup_ratio=warmup / steps),
        documents=documents,
        mix=mix,
        adam_beta2=0.999,
        weight_decay=0.1,
        start="card" if seq_length == first else "previous",
    )


def _v1(size: str, card: str, steps: Mapping[int, int], *, last_base: float) -> Ladder:
    batch, warmup = (8 * M, 150) if size == "8b" else (16 * M, 75)
    bases = {8 * K: 1e6, 16 * K: 2e6, 32 * K: 4e6, 64 * K: last_base}
    return Ladder(
        name=f"apertus_{size}",
        source="arXiv 2509.14233, section 2.5; swiss-ai/pretrain-code, long_context",
        cards=(card,),
        data=(
            "70% of the last phase of pretraining, 20% FineWeb-Long, 10% institutional books; "
            "documents within their mask up to 32K, across at 64K."
        ),
        ours=(MODEL, "Names of the three sources in the mix."),
        departures=(OPTIMIZER,),
        stages=tuple(
            _stage(
                seq_length,
                base=bases[seq_length],
                factor=8,
                steps=steps[seq_length],
                batch=batch,
                rate=RATES[size],
                warmup=warmup,
                documents="across" if seq_length == 64 * K else "within",
                mix=Mix(
                    shares=(
                        Share(source="pretraining", weight=0.7),
                        Share(source="fineweb_long", weight=0.2),
                        Share(source="institutional_books", weight=0.1),
                    ),
                    packing="cut",
                ),
                first=8 * K,
            )
            for seq_length in bases
        ),
    )


def _v15(size: str, card: str, steps: Mapping[int, int], *, as_trained: bool) -> Ladder:
    batch, rate = (8 * M, 1.1e-5) if size == "8b" else (16 * M, 2e-6)
    longest = (8, 8) if as_trained else (16, 32)
    factors = {32 * K: 8, 64 * K: 8, 128 * K: longest[0], 256 * K: longest[1]}
    of_trained = (
        "The factors are those that Megatron used, 8 in all stages, as in the published models; "
        "the scripts set 16 at 128K and 32 at 256K, which was ignored."
    )
    of_meant = (
        "The factors are those that the scripts set and recommend, 16 at 128K and 32 at 256K; "
        "Megatron ignored them, and the published models were trained with 8."
    )

    def warmup(seq_length: int) -> int:
        if size == "8b":
            return 300
        return 0 if seq_length == 32 * K else 100

    return Ladder(
        name=f"apertus15_{size}" + ("_as_trained" if as_trained else ""),
        source="swiss-ai/pretrain-code, long-context at commit fa7c0a1",
        cards=(card,),
        data=(
            "8B: 60B tokens a stage, of which 46% vision, 14% audio and 39% text, 9B of it long; "
            "the long text includes synthetic needles, common words and orders of documents."
        ),
        ours=(MODEL,),
        departures=(
            of_trained if as_trained else of_meant,
            OPTIMIZER,
            "Left out: images, audio and instructions, with their masks of the loss, and the "
            "goldfish loss, which skips one token of fifty.",
        ),
        stages=tuple(
            _stage(
                seq_length,
                base=2e6 if seq_length == 32 * K else 4e6,
                factor=factor,
                steps=steps[seq_length],
                batch=batch,
                rate=rate,
                warmup=warmup(seq_length),
                documents="within",
                mix=Mix(documents_per_row=seq_length // K),
                first=32 * K,
            )
            for seq_length, factor in factors.items()
        ),
    )


_STEPS_8B = {32 * K: 8_000, 64 * K: 7_000, 128 * K: 7_000, 256 * K: 7_000}
_STEPS_70B = {32 * K: 3_625, 64 * K: 3_500, 128 * K: 3_000, 256 * K: 3_000}

APERTUS_8B = _v1(
    "8b",
    "llama3_8b",
    {8 * K: 9_350, 16 * K: 6_930, 32 * K: 7_000, 64 * K: 3_480},
    last_base=12e6,
)
APERTUS_70B = _v1(
    "70b",
    "llama3_70b",
    {8 * K: 4_800, 16 * K: 3_600, 32 * K: 3_580, 64 * K: 1_742},
    last_base=8e6,
)
APERTUS15_8B = _v15("8b", "llama3_8b", _STEPS_8B, as_trained=False)
APERTUS15_8B_AS_TRAINED = _v15("8b", "llama3_8b", _STEPS_8B, as_trained=True)
APERTUS15_70B = _v15("70b", "llama3_70b", _STEPS_70B, as_trained=False)
APERTUS15_70B_AS_TRAINED = _v15("70b", "llama3_70b", _STEPS_70B, as_trained=True)
