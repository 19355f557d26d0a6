# SPDX-License-Identifier: Apache-2.0
"""Ladders, one module per source."""

from recipes.ladders.fifteen_million import FIFTEEN_MILLION
from recipes.ladders.five_million import FIVE_MILLION
from recipes.ladders.gene import GENE_64K
from recipes.ladders.llama2_long import LLAMA2_LONG_16K, LLAMA2_LONG_32K
from recipes.ladders.llama31 import LLAMA31
from recipes.ladders.longrecipe import LONGRECIPE_128K
from recipes.ladders.longrope2 import LONGROPE2
from recipes.ladders.lwm import LWM
from recipes.ladders.nemo import NEMO
from recipes.ladders.prolong import PROLONG
from recipes.ladders.qwen25_1m import QWEN25_1M
from recipes.ladders.tiny import TINY_LADDER
from recipes.ladders.ultralong import ULTRALONG_1M, ULTRALONG_2M, ULTRALONG_4M
from recipes.ladders.yarn import YARN
from recipes.spec.stage import Ladder

__all__ = [
    "FIFTEEN_MILLION",
    "FIVE_MILLION",
    "GENE_64K",
    "LADDERS",
    "LLAMA2_LONG_16K",
    "LLAMA2_LONG_32K",
    "LLAMA31",
    "LONGRECIPE_128K",
    "LONGROPE2",
    "LWM",
    "NEMO",
    "PROLONG",
    "QWEN25_1M",
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
        FIVE_MILLION,
        FIFTEEN_MILLION,
    )
}
