# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes, one row each; light.

A row is listed where a source or a measurement stands behind it. Any other combination of card,
ladder and stage is named by `longhaul pretrain --card --ladder --stage`. A row is called
`<card>_<ladder>_<length>` and imported by that name from `recipes.shipped`.

`python -m recipes.shipped.regenerate` writes `nodes` and `layout` of each row without `pinned`.
After a row in bf16 may come the same stage in FP8, `<name>_fp8`, on a GPU that its recipe needs.
"""

from dataclasses import replace

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.ladders import (
    APERTUS15_8B,
    APERTUS15_8B_AS_TRAINED,
    APERTUS15_70B,
    APERTUS15_70B_AS_TRAINED,
    APERTUS_8B,
    APERTUS_70B,
    DEEPSEEK_V3,
    FIFTEEN_MILLION,
    FIVE_MILLION,
    GENE_64K,
    K2V2,
    LLAMA2_LONG_16K,
    LLAMA2_LONG_32K,
    LLAMA31,
    LONGRECIPE_128K,
    LONGROPE2,
    LWM,
    MEGABEAM,
    MINIMAX01,
    NEMO,
    OLMO3_7B,
    OLMO3_32B,
    PROLONG,
    QWEN25_1M,
    SMOLLM3,
    TINY_LADDER,
    ULTRALONG_1M,
    ULTRALONG_2M,
    ULTRALONG_4M,
    YARN,
)
from recipes.models.llama import (
    LLAMA2_7B,
    LLAMA2_13B,
    LLAMA2_70B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA31_8B,
    LLAMA31_405B,
    LLAMA32_1B,
)
from recipes.models.mistral import MISTRAL_7B, MIXTRAL_8X7B, MIXTRAL_8X22B
from recipes.models.nemotron import NEMOTRON3_22B, NEMOTRON4_15B
from recipes.models.olmo3 import OLMO3_8K_7B, OLMO3_8K_32B
from recipes.models.qwen import QWEN25_7B, QWEN25_14B
from recipes.models.smollm3 import SMOLLM3_4K_3B
from recipes.models.tiny import TINY
from recipes.shipped.row import Row
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.units import K, M

_MEASURED = "measured on two CPU cores"
_ON_H100 = "FP8 as in NeMo's runs of Llama 2 7B on H100 at 16K to 1M, there with delayed scaling"
_ON_B200 = "FP8 as in NeMo's runs of Llama 3 8B on B200 at 8K to 1M, there scaled tensorwise"
_ON_ONE_H100 = "FP8 as in measured steps of Llama 3.2 1B and of layers of Llama 3.1 8B on one H100"
_WITHOUT_CP = "planned without context parallelism, for comparison"

tiny_512 = Row(
    card=TINY,
    ladder=TINY_LADDER,
    seq_length=512,
    cluster="local",
    nodes=1,
    layout=Layout(dp=2, micro_batch=4, precision="fp32", device="cpu"),
    pinned=_MEASURED,
)

tiny_2k = Row(
    card=TINY,
    ladder=TINY_LADDER,
    seq_length=2 * K,
    cluster="local",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu"),
    pinned=_MEASURED,
)

tiny_8k = Row(
    card=TINY,
    ladder=TINY_LADDER,
    seq_length=8 * K,
    cluster="local",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu"),
    pinned=_MEASURED,
)

llama3_8b_nemo_16k = Row(
    card=LLAMA3_8B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(8)),
)

llama3_8b_nemo_16k_fp8 = replace(
    llama3_8b_nemo_16k,
    cluster="dgx_b200",
    nodes=1,
    layout=Layout(dp=8, tiling=Tiling(loss=True), fp8=Fp8(recipe="mxfp8")),
    variant="fp8",
    variant_source=_ON_B200,
)

llama3_8b_nemo_16k_without_cp = replace(
    llama3_8b_nemo_16k,
    nodes=1,
    layout=Layout(dp=8, recompute=Recompute(kind="kept_attention"), tiling=Tiling(loss=True)),
    variant="without_cp",
    pinned=_WITHOUT_CP,
)

llama3_8b_nemo_64k = Row(
    card=LLAMA3_8B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.head_chunked(4), tiling=Tiling(loss=True)),
)

llama3_8b_nemo_64k_fp8 = replace(
    llama3_8b_nemo_64k,
    cluster="dgx_b200",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.ulysses(4), dp=2, tiling=Tiling(loss=True), fp8=Fp8(recipe="mxfp8")
    ),
    variant="fp8",
    variant_source=_ON_B200,
)

llama3_8b_nemo_128k = Row(
    card=LLAMA3_8B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama3_8b_nemo_128k_fp8 = replace(
    llama3_8b_nemo_128k,
    cluster="dgx_b200",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(8), tiling=Tiling(loss=True), fp8=Fp8(recipe="mxfp8")),
    variant="fp8",
    variant_source=_ON_B200,
)

llama2_13b_llama2_long_32k = Row(
    card=LLAMA2_13B,
    ladder=LLAMA2_LONG_32K,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(tp=2, cp=ContextParallel.ulysses(4), dp=16, tiling=Tiling(loss=True)),
)

llama2_7b_llama2_long_32k = Row(
    card=LLAMA2_7B,
    ladder=LLAMA2_LONG_32K,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(cp=ContextParallel.ulysses(8), dp=8),
)

llama2_70b_llama2_long_16k = Row(
    card=LLAMA2_70B,
    ladder=LLAMA2_LONG_16K,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=64,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=8, ring=4), pp=8, dp=2),
)

llama31_405b_llama31_16k = Row(
    card=LLAMA31_405B,
    ladder=LLAMA31,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=128,
    layout=Layout(tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=4), pp=16, dp=2),
)

llama31_405b_llama31_32k = Row(
    card=LLAMA31_405B,
    ladder=LLAMA31,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=128,
    layout=Layout(tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=8), pp=16),
)

llama31_405b_llama31_48k = Row(
    card=LLAMA31_405B,
    ladder=LLAMA31,
    seq_length=48 * K,
    cluster="dgx_h100",
    nodes=256,
    layout=Layout(tp=4, cp=ContextParallel.ulysses(32), pp=16),
)

llama31_405b_llama31_64k = Row(
    card=LLAMA31_405B,
    ladder=LLAMA31,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=256,
    layout=Layout(tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=16), pp=16),
)

llama31_405b_llama31_96k = Row(
    card=LLAMA31_405B,
    ladder=LLAMA31,
    seq_length=96 * K,
    cluster="dgx_h100",
    nodes=256,
    layout=Layout(tp=8, cp=ContextParallel.ring(16), pp=16, tiling=Tiling(loss=True)),
)

llama31_405b_llama31_128k = Row(
    card=LLAMA31_405B,
    ladder=LLAMA31,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=256,
    layout=Layout(tp=8, cp=ContextParallel.ring(32), pp=8),
)

llama3_8b_prolong_64k = Row(
    card=LLAMA3_8B,
    ladder=PROLONG,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.head_chunked(4), tiling=Tiling(loss=True)),
)

llama3_8b_prolong_512k = Row(
    card=LLAMA3_8B,
    ladder=PROLONG,
    seq_length=512 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(
        cp=ContextParallel.head_chunked(2),
        dp=16,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=129.1),
    ),
)

qwen25_7b_qwen25_1m_64k = Row(
    card=QWEN25_7B,
    ladder=QWEN25_1M,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.hybrid(ulysses=2, ring=2), tiling=Tiling(loss=True)),
)

qwen25_7b_qwen25_1m_128k = Row(
    card=QWEN25_7B,
    ladder=QWEN25_1M,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=49.5),
    ),
)

qwen25_7b_qwen25_1m_256k = Row(
    card=QWEN25_7B,
    ladder=QWEN25_1M,
    seq_length=256 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=98.9),
    ),
)

llama31_8b_ultralong_1m = Row(
    card=LLAMA31_8B,
    ladder=ULTRALONG_1M,
    seq_length=1 * M,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.ulysses(8),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama31_8b_ultralong_2m = Row(
    card=LLAMA31_8B,
    ladder=ULTRALONG_2M,
    seq_length=2 * M,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        tp=2,
        cp=ContextParallel.ulysses(4),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=129.1),
    ),
)

llama31_8b_ultralong_4m = Row(
    card=LLAMA31_8B,
    ladder=ULTRALONG_4M,
    seq_length=4 * M,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(
        tp=2,
        cp=ContextParallel.hybrid(ulysses=4, ring=2),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=129.1),
    ),
)

llama2_7b_lwm_32k = Row(
    card=LLAMA2_7B,
    ladder=LWM,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(8)),
)

llama2_7b_lwm_128k = Row(
    card=LLAMA2_7B,
    ladder=LWM,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama2_7b_lwm_256k = Row(
    card=LLAMA2_7B,
    ladder=LWM,
    seq_length=256 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=129.1),
    ),
)

llama2_7b_lwm_256k_fp8 = replace(
    llama2_7b_lwm_256k,
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=129.1),
        fp8=Fp8(recipe="blockwise"),
    ),
    variant="fp8",
    variant_source=_ON_H100,
)

llama2_7b_lwm_512k = Row(
    card=LLAMA2_7B,
    ladder=LWM,
    seq_length=512 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(2),
        dp=4,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=129.1),
    ),
)

llama2_7b_lwm_1m = Row(
    card=LLAMA2_7B,
    ladder=LWM,
    seq_length=1 * M,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.ulysses(8),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama2_7b_lwm_1m_fp8 = replace(
    llama2_7b_lwm_1m,
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(8),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
        fp8=Fp8(recipe="blockwise"),
    ),
    variant="fp8",
    variant_source=_ON_H100,
)

llama2_7b_yarn_64k = Row(
    card=LLAMA2_7B,
    ladder=YARN,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.ulysses(4), tiling=Tiling(loss=True)),
)

llama2_7b_yarn_128k = Row(
    card=LLAMA2_7B,
    ladder=YARN,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama3_8b_longrope2_128k = Row(
    card=LLAMA3_8B,
    ladder=LONGROPE2,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama3_8b_longrecipe_128k = Row(
    card=LLAMA3_8B,
    ladder=LONGRECIPE_128K,
    seq_length=38_400,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.ulysses(4), tiling=Tiling(loss=True)),
)

llama2_7b_gene_64k = Row(
    card=LLAMA2_7B,
    ladder=GENE_64K,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(4), dp=2),
)

llama3_70b_k2v2_64k = Row(
    card=LLAMA3_70B,
    ladder=K2V2,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=256,
    layout=Layout(tp=2, cp=ContextParallel.hybrid(ulysses=4, ring=8), pp=8, dp=4),
)

llama3_70b_k2v2_128k = Row(
    card=LLAMA3_70B,
    ladder=K2V2,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=128,
    layout=Layout(
        tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=8), pp=4, dp=4, tiling=Tiling(loss=True)
    ),
)

llama3_70b_k2v2_512k = Row(
    card=LLAMA3_70B,
    ladder=K2V2,
    seq_length=512 * K,
    cluster="dgx_h100",
    nodes=128,
    layout=Layout(
        tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=32), pp=4, tiling=Tiling(loss=True)
    ),
)

llama3_8b_apertus_8b_8k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS_8B,
    seq_length=8 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(tp=2, dp=8),
    pinned="the source's layout: TP 2, no context parallelism",
)

llama3_8b_apertus_8b_16k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS_8B,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(8)),
)

llama3_8b_apertus_8b_32k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS_8B,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(cp=ContextParallel.ulysses(8), dp=2),
)

llama3_8b_apertus_8b_64k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS_8B,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.head_chunked(4), tiling=Tiling(loss=True)),
)

llama3_70b_apertus_70b_8k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS_70B,
    seq_length=8 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(tp=2, cp=ContextParallel.hybrid(ulysses=4, ring=2), pp=4, dp=2),
)

llama3_70b_apertus_70b_16k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS_70B,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(tp=2, cp=ContextParallel.hybrid(ulysses=4, ring=4), pp=4),
)

llama3_70b_apertus_70b_32k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS_70B,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(
        tp=4,
        cp=ContextParallel.hybrid(ulysses=2, ring=2, heads_per_stage=2),
        pp=4,
        dp=2,
        tiling=Tiling(loss=True),
    ),
)

llama3_70b_apertus_70b_64k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS_70B,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        tp=2,
        cp=ContextParallel.ulysses(4),
        pp=4,
        dp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
        offload=Offload(tensors="both", cap_gib=20.3),
    ),
)

llama3_8b_apertus15_8b_32k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(cp=ContextParallel.ulysses(8), dp=2),
)

llama3_8b_apertus15_8b_64k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(cp=ContextParallel.ulysses(8), pp=2, tiling=Tiling(loss=True)),
)

llama3_8b_apertus15_8b_128k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=8, ring=4)),
)

llama3_8b_apertus15_8b_256k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B,
    seq_length=256 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        cp=ContextParallel.ulysses(2),
        dp=32,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama3_8b_apertus15_8b_as_trained_32k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B_AS_TRAINED,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(cp=ContextParallel.ulysses(8), dp=2),
)

llama3_8b_apertus15_8b_as_trained_64k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B_AS_TRAINED,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(cp=ContextParallel.ulysses(8), pp=2, tiling=Tiling(loss=True)),
)

llama3_8b_apertus15_8b_as_trained_128k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B_AS_TRAINED,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=8, ring=4)),
)

llama3_8b_apertus15_8b_as_trained_256k = Row(
    card=LLAMA3_8B,
    ladder=APERTUS15_8B_AS_TRAINED,
    seq_length=256 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        cp=ContextParallel.ulysses(2),
        dp=32,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama3_70b_apertus15_70b_32k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(
        tp=4,
        cp=ContextParallel.hybrid(ulysses=2, ring=2, heads_per_stage=2),
        pp=4,
        dp=2,
        tiling=Tiling(loss=True),
    ),
)

llama3_70b_apertus15_70b_64k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(
        cp=ContextParallel.ulysses(8),
        pp=8,
        dp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
        offload=Offload(tensors="both", cap_gib=20.3),
    ),
)

llama3_70b_apertus15_70b_128k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=32,
    layout=Layout(
        tp=2,
        cp=ContextParallel.hybrid(ulysses=4, ring=4),
        pp=4,
        dp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
    ),
)

llama3_70b_apertus15_70b_256k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B,
    seq_length=256 * K,
    cluster="dgx_h100",
    nodes=32,
    layout=Layout(
        tp=8,
        cp=ContextParallel.head_chunked(1),
        dp=32,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=80.8),
    ),
)

llama3_70b_apertus15_70b_as_trained_32k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B_AS_TRAINED,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(
        tp=4,
        cp=ContextParallel.hybrid(ulysses=2, ring=2, heads_per_stage=2),
        pp=4,
        dp=2,
        tiling=Tiling(loss=True),
    ),
)

llama3_70b_apertus15_70b_as_trained_64k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B_AS_TRAINED,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(
        cp=ContextParallel.ulysses(8),
        pp=8,
        dp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
        offload=Offload(tensors="both", cap_gib=20.3),
    ),
)

llama3_70b_apertus15_70b_as_trained_128k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B_AS_TRAINED,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=32,
    layout=Layout(
        tp=2,
        cp=ContextParallel.hybrid(ulysses=4, ring=4),
        pp=4,
        dp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
    ),
)

llama3_70b_apertus15_70b_as_trained_256k = Row(
    card=LLAMA3_70B,
    ladder=APERTUS15_70B_AS_TRAINED,
    seq_length=256 * K,
    cluster="dgx_h100",
    nodes=32,
    layout=Layout(
        tp=8,
        cp=ContextParallel.head_chunked(1),
        dp=32,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=80.8),
    ),
)

smollm3_4k_3b_smollm3_32k = Row(
    card=SMOLLM3_4K_3B,
    ladder=SMOLLM3,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(4), dp=2, tiling=Tiling(loss=True)),
)

smollm3_4k_3b_smollm3_64k = Row(
    card=SMOLLM3_4K_3B,
    ladder=SMOLLM3,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(8), tiling=Tiling(loss=True)),
)

olmo3_8k_7b_olmo3_7b_64k = Row(
    card=OLMO3_8K_7B,
    ladder=OLMO3_7B,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.ulysses(4), tiling=Tiling(loss=True)),
)

olmo3_8k_32b_olmo3_32b_64k = Row(
    card=OLMO3_8K_32B,
    ladder=OLMO3_32B,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=4), pp=2, tiling=Tiling(loss=True)
    ),
)

llama2_7b_deepseek_v3_32k = Row(
    card=LLAMA2_7B,
    ladder=DEEPSEEK_V3,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(cp=ContextParallel.ulysses(8), dp=2),
)

llama2_7b_deepseek_v3_128k = Row(
    card=LLAMA2_7B,
    ladder=DEEPSEEK_V3,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=8, ring=2), pp=2, tiling=Tiling(loss=True)),
)

llama3_8b_minimax01_128k = Row(
    card=LLAMA3_8B,
    ladder=MINIMAX01,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=16,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=8, ring=4), dp=4),
)

llama3_8b_minimax01_512k = Row(
    card=LLAMA3_8B,
    ladder=MINIMAX01,
    seq_length=512 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        cp=ContextParallel.head_chunked(2),
        dp=32,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=129.1),
    ),
)

llama3_8b_minimax01_1m = Row(
    card=LLAMA3_8B,
    ladder=MINIMAX01,
    seq_length=1 * M,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        cp=ContextParallel.ulysses(8),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

mistral_7b_megabeam_300k = Row(
    card=MISTRAL_7B,
    ladder=MEGABEAM,
    seq_length=300 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=151.3),
    ),
)

mistral_7b_megabeam_600k = Row(
    card=MISTRAL_7B,
    ladder=MEGABEAM,
    seq_length=600 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(2),
        dp=4,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=151.3),
    ),
)

mistral_7b_megabeam_50k = Row(
    card=MISTRAL_7B,
    ladder=MEGABEAM,
    seq_length=50 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.ulysses(4), tiling=Tiling(loss=True)),
)

llama3_8b_five_million_5m = Row(
    card=LLAMA3_8B,
    ladder=FIVE_MILLION,
    seq_length=5 * M,
    cluster="dgx_h200",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(8),
        recompute=Recompute(kind="full"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="inputs", cap_gib=160.1),
    ),
    pinned="one node, as the source's; 80 GB a GPU hold 5,000K here",
)

llama31_8b_fifteen_million_15m = Row(
    card=LLAMA31_8B,
    ladder=FIFTEEN_MILLION,
    seq_length=15 * M,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        cp=ContextParallel.hybrid(ulysses=8, ring=8, heads_per_stage=8),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=121.1),
    ),
)

llama31_8b_fifteen_million_15m_on_32xh100 = replace(
    llama31_8b_fifteen_million_15m,
    nodes=4,
    layout=Layout(
        tp=2,
        cp=ContextParallel.hybrid(ulysses=1, ring=16, heads_per_stage=1),
        recompute=Recompute(kind="full"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="inputs", cap_gib=120.1),
    ),
    variant="on_32xh100",
    pinned="planned for the source's machine, four nodes",
)

llama3_8b_llama31_16k = Row(
    card=LLAMA3_8B,
    ladder=LLAMA31,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(cp=ContextParallel.ulysses(4), dp=8),
)

llama3_8b_llama31_32k = Row(
    card=LLAMA3_8B,
    ladder=LLAMA31,
    seq_length=32 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(cp=ContextParallel.ulysses(8), dp=4),
)

llama3_8b_llama31_32k_without_cp = replace(
    llama3_8b_llama31_32k,
    nodes=4,
    layout=Layout(
        dp=32, recompute=Recompute(kind="kept_attention"), tiling=Tiling(loss=True, mlp=True)
    ),
    variant="without_cp",
    pinned=_WITHOUT_CP,
)

llama3_8b_llama31_48k = Row(
    card=LLAMA3_8B,
    ladder=LLAMA31,
    seq_length=48 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(cp=ContextParallel.ulysses(8), pp=2, dp=2, tiling=Tiling(loss=True)),
)

llama3_8b_llama31_64k = Row(
    card=LLAMA3_8B,
    ladder=LLAMA31,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(cp=ContextParallel.ulysses(8), pp=2, dp=2, tiling=Tiling(loss=True)),
)

llama3_8b_llama31_96k = Row(
    card=LLAMA3_8B,
    ladder=LLAMA31,
    seq_length=96 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=8, ring=4), dp=2),
)

llama3_8b_llama31_128k = Row(
    card=LLAMA3_8B,
    ladder=LLAMA31,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=8, ring=4), dp=2),
)

llama31_8b_nemo_16k = Row(
    card=LLAMA31_8B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(8)),
)

llama31_8b_nemo_16k_fp8 = replace(
    llama31_8b_nemo_16k,
    nodes=1,
    layout=Layout(
        cp=ContextParallel.ulysses(2),
        pp=2,
        dp=2,
        tiling=Tiling(loss=True),
        fp8=Fp8(recipe="blockwise"),
    ),
    variant="fp8",
    variant_source=_ON_H100,
)

llama31_8b_nemo_64k = Row(
    card=LLAMA31_8B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.head_chunked(4), tiling=Tiling(loss=True)),
)

llama31_8b_nemo_64k_fp8 = replace(
    llama31_8b_nemo_64k,
    nodes=1,
    layout=Layout(
        tp=2,
        cp=ContextParallel.head_chunked(4),
        tiling=Tiling(loss=True),
        fp8=Fp8(recipe="blockwise"),
    ),
    variant="fp8",
    variant_source=_ON_H100,
)

llama31_8b_nemo_64k_on_1xh100 = replace(
    llama31_8b_nemo_64k,
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=32.4),
        optimizer_offload=0.8,
    ),
    variant="on_1xh100",
    pinned="planned for 1 GPU of dgx_h100 and 256 GiB of host memory; not run on a GPU",
)

llama31_8b_nemo_128k = Row(
    card=LLAMA31_8B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.6),
    ),
)

llama31_8b_nemo_128k_fp8 = replace(
    llama31_8b_nemo_128k,
    nodes=1,
    layout=Layout(
        tp=2,
        cp=ContextParallel.ulysses(4),
        tiling=Tiling(loss=True, mlp=True),
        fp8=Fp8(recipe="tensorwise"),
    ),
    variant="fp8",
    variant_source=_ON_ONE_H100,
)

llama32_1b_nemo_16k = Row(
    card=LLAMA32_1B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(dp=8, tiling=Tiling(loss=True)),
)

llama32_1b_nemo_64k = Row(
    card=LLAMA32_1B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(2), dp=4, tiling=Tiling(loss=True)),
)

llama32_1b_nemo_64k_fp8 = replace(
    llama32_1b_nemo_64k,
    nodes=1,
    layout=Layout(
        cp=ContextParallel.ulysses(2), dp=4, tiling=Tiling(loss=True), fp8=Fp8(recipe="tensorwise")
    ),
    variant="fp8",
    variant_source=_ON_ONE_H100,
)

llama32_1b_nemo_128k = Row(
    card=LLAMA32_1B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(cp=ContextParallel.ulysses(4), dp=2, tiling=Tiling(loss=True)),
)

llama32_1b_nemo_128k_fp8 = replace(
    llama32_1b_nemo_128k,
    nodes=1,
    layout=Layout(
        cp=ContextParallel.ulysses(4), dp=2, tiling=Tiling(loss=True), fp8=Fp8(recipe="tensorwise")
    ),
    variant="fp8",
    variant_source=_ON_ONE_H100,
)

llama3_70b_nemo_16k = Row(
    card=LLAMA3_70B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(tp=8, cp=ContextParallel.ring(2), pp=2, tiling=Tiling(loss=True)),
)

llama3_70b_nemo_64k = Row(
    card=LLAMA3_70B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(
        tp=4,
        cp=ContextParallel.ulysses(2),
        pp=4,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
        offload=Offload(tensors="inputs", cap_gib=10.1),
    ),
)

llama3_70b_nemo_128k = Row(
    card=LLAMA3_70B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=4,
    layout=Layout(
        tp=4,
        cp=ContextParallel.ulysses(2),
        pp=4,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=40.5),
    ),
)

mixtral_8x7b_nemo_16k = Row(
    card=MIXTRAL_8X7B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(tp=2, cp=ContextParallel.ulysses(4), pp=2, ep=8, etp=1),
)

mixtral_8x7b_nemo_64k = Row(
    card=MIXTRAL_8X7B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(
        cp=ContextParallel.ulysses(8),
        pp=2,
        ep=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
    ),
)

mixtral_8x7b_nemo_128k = Row(
    card=MIXTRAL_8X7B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(
        cp=ContextParallel.ulysses(8),
        pp=2,
        ep=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
    ),
)

mixtral_8x22b_nemo_16k = Row(
    card=MIXTRAL_8X22B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=2), pp=4, ep=8, etp=1),
)

mixtral_8x22b_nemo_64k = Row(
    card=MIXTRAL_8X22B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        cp=ContextParallel.hybrid(ulysses=8, ring=2),
        pp=4,
        ep=8,
        recompute=Recompute(kind="kept_attention"),
    ),
)

mixtral_8x22b_nemo_128k = Row(
    card=MIXTRAL_8X22B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=8,
    layout=Layout(
        cp=ContextParallel.hybrid(ulysses=8, ring=2),
        pp=4,
        ep=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
    ),
)

nemotron3_22b_nemo_16k = Row(
    card=NEMOTRON3_22B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=4, cp=ContextParallel.head_chunked(1), pp=2, tiling=Tiling(loss=True)),
)

nemotron3_22b_nemo_64k = Row(
    card=NEMOTRON3_22B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        tp=2,
        pp=2,
        dp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=30.4),
    ),
)

nemotron3_22b_nemo_128k = Row(
    card=NEMOTRON3_22B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        tp=4,
        cp=ContextParallel.head_chunked(1),
        dp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=30.4),
    ),
)

nemotron4_15b_nemo_16k = Row(
    card=NEMOTRON4_15B,
    ladder=NEMO,
    seq_length=16 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=2, cp=ContextParallel.ulysses(2), pp=2, tiling=Tiling(loss=True)),
)

nemotron4_15b_nemo_64k = Row(
    card=NEMOTRON4_15B,
    ladder=NEMO,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        tp=2,
        cp=ContextParallel.ulysses(4),
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True),
        offload=Offload(tensors="both", cap_gib=6.2),
    ),
)

nemotron4_15b_nemo_128k = Row(
    card=NEMOTRON4_15B,
    ladder=NEMO,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(tp=4, cp=ContextParallel.head_chunked(2), tiling=Tiling(loss=True, mlp=True)),
)

llama2_13b_yarn_64k = Row(
    card=LLAMA2_13B,
    ladder=YARN,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        tp=2,
        cp=ContextParallel.head_chunked(1),
        dp=4,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="inputs", cap_gib=12.6),
    ),
)

llama2_13b_yarn_128k = Row(
    card=LLAMA2_13B,
    ladder=YARN,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        tp=2,
        cp=ContextParallel.head_chunked(1),
        dp=4,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=50.5),
    ),
)

qwen25_14b_qwen25_1m_64k = Row(
    card=QWEN25_14B,
    ladder=QWEN25_1M,
    seq_length=64 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        cp=ContextParallel.ulysses(4),
        pp=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=15.3),
    ),
)

qwen25_14b_qwen25_1m_128k = Row(
    card=QWEN25_14B,
    ladder=QWEN25_1M,
    seq_length=128 * K,
    cluster="dgx_h100",
    nodes=1,
    layout=Layout(
        tp=2,
        cp=ContextParallel.head_chunked(1),
        dp=4,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=60.6),
    ),
)

qwen25_14b_qwen25_1m_256k = Row(
    card=QWEN25_14B,
    ladder=QWEN25_1M,
    seq_length=256 * K,
    cluster="dgx_h100",
    nodes=2,
    layout=Layout(
        tp=2,
        cp=ContextParallel.head_chunked(1),
        dp=8,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=121.1),
    ),
)

ROWS: dict[str, Row] = {name: row for name, row in globals().items() if isinstance(row, Row)}
"""Every row by its name, in the order of this file."""
