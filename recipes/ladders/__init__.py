# SPDX-License-Identifier: Apache-2.0
"""Ladders, one module per source."""

from recipes.ladders.apertus import (
    APERTUS15_8B,
    APERTUS15_8B_AS_TRAINED,
    APERTUS15_70B,
    APERTUS15_70B_AS_TRAINED,
    APERTUS_8B,
    APERTUS_70B,
)
from recipes.ladders.deepseek_v3 import DEEPSEEK_V3
from recipes.ladders.fifteen_million import FIFTEEN_MILLION
from recipes.ladders.five_million import FIVE_MILLION
from recipes.ladders.gene import GENE_64K
from recipes.ladders.k2v2 import K2V2
from recipes.ladders.llama2_long import LLAMA2_LONG_16K, LLAMA2_LONG_32K
from recipes.ladders.llama31 import LLAMA31
from recipes.ladders.longrecipe import LONGRECIPE_128K
from recipes.ladders.longrope2 import LONGROPE2
from recipes.ladders.lwm import LWM
from recipes.ladders.megabeam import MEGABEAM
from recipes.ladders.minimax01 import MINIMAX01
from recipes.ladders.nemo import NEMO
from recipes.ladders.olmo3 import OLMO3_7B, OLMO3_32B
from recipes.ladders.prolong import PROLONG
from recipes.ladders.qwen25_1m import QWEN25_1M
from recipes.ladders.smollm3 import SMOLLM3
from recipes.ladders.tiny import TINY_LADDER
from recipes.ladders.ultralong import ULTRALONG_1M, ULTRALONG_2M, ULTRALONG_4M
from recipes.ladders.yarn import YARN
from recipes.spec.stage import Ladder

__all__ = [
    "APERTUS15_8B",
    "APERTUS15_8B_AS_TRAINED",
    "APERTUS15_70B",
    "APERTUS15_70B_AS_TRAINED",
    "APERTUS_8B",
    "APERTUS_70B",
    "DEEPSEEK_V3",
    "FIFTEEN_MILLION",
    "FIVE_MILLION",
    "GENE_64K",
    "K2V2",
    "LADDERS",
    "LLAMA2_LONG_16K",
    "LLAMA2_LONG_32K",
    "LLAMA31",
    "LONGRECIPE_128K",
    "LONGROPE2",
    "LWM",
    "MEGABEAM",
    "MINIMAX01",
    "NEMO",
    "OLMO3_7B",
    "OLMO3_32B",
    "PROLONG",
    "QWEN25_1M",
    "SMOLLM3",
    "TINY_LADDER",
    "ULTRALONG_1M",
    "ULTRALONG_2M",
    "ULTRALONG_4M",
    "YARN",
]

LADDERS: dict[str, Ladder] = {
    ladder.name: ladder
    for ladder in (
        TINY_LADDER,
        NEMO,
        LLAMA2_LONG_32K,
        LLAMA2_LONG_16K,
        LLAMA31,
        PROLONG,
        QWEN25_1M,
        ULTRALONG_1M,
        ULTRALONG_2M,
        ULTRALONG_4M,
        LWM,
        YARN,
        LONGROPE2,
        LONGRECIPE_128K,
        GENE_64K,
        K2V2,
        APERTUS_8B,
        APERTUS_70B,
        APERTUS15_8B,
        APERTUS15_8B_AS_TRAINED,
        APERTUS15_70B,
        APERTUS15_70B_AS_TRAINED,
        SMOLLM3,
        OLMO3_7B,
        OLMO3_32B,
        DEEPSEEK_V3,
        MINIMAX01,
        MEGABEAM,
        FIVE_MILLION,
        FIFTEEN_MILLION,
    )
}
