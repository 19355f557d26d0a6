# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes, one row each; light.

A row is listed where a source or a measurement stands behind it. Any other combination of card,
ladder and stage is named by `longhaul pretrain --card --ladder --stage`. A row is called
`<card>_<ladder>_<length>`, with its variant at the end, and imported by that name from
`recipes.shipped`.

`python -m recipes.shipped.regenerate` writes nodes and layout of each row without `pinned`.
After a row in bf16 may come the same stage in FP8, `<name>_fp8`, on a GPU that its recipe needs.
"""

import re

from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.shipped.row import Row
from recipes.spec.naming import length_from

MEASURED = "measured on two CPU cores"
ON_H100 = "FP8 as in NeMo's runs of Llama 2 7B on H100 at 16K to 1M, there with delayed scaling"
ON_B200 = "FP8 as in NeMo's runs of Llama 3 8B on B200 at 8K to 1M, there scaled tensorwise"
ON_ONE_H100 = "FP8 as in measured steps of Llama 3.2 1B and of layers of Llama 3.1 8B on one H100"
WITHOUT_CP = "planned without context parallelism, for comparison"
ONE_GPU = "planned for 1 GPU of dgx_h100 and 256 GiB of host memory; not run on a GPU"


def _row(
    address: str, on: str, layout: str, *, variant: str = "", pinned: str = "", source: str = ""
) -> Row:
    """Return the row of `CARD@LADDER:LENGTH` on `CLUSTER:NODES`, with the words of its layout."""
    card, ladder, length = re.split("[@:]", address)
    cluster, nodes = on.split(":")
    return Row(
        card=CARDS[card],
        ladder=LADDERS[ladder],
        seq_length=length_from(length),
        cluster=cluster,
        nodes=int(nodes),
        layout=layout_from(layout),
        variant=variant,
        pinned=pinned,
        variant_source=source,
    )


# fmt: off
_TABLE = (
    _row("tiny@tiny:512", "local:1", "dp2 mb4 fp32 cpu", pinned=MEASURED),
    _row("tiny@tiny:2K", "local:1", "ulysses2 fp32 cpu", pinned=MEASURED),
    _row("tiny@tiny:8K", "local:1", "ulysses2 fp32 cpu", pinned=MEASURED),

    _row("llama3_8b@nemo:16K", "dgx_h100:1", "ulysses8"),
    _row("llama3_8b@nemo:16K", "dgx_b200:1",
        "dp8 tile-loss fp8:mxfp8", variant="fp8", source=ON_B200),
    _row("llama3_8b@nemo:16K", "dgx_h100:1",
        "dp8 kept_attention tile-loss", variant="without_cp", pinned=WITHOUT_CP),
    _row("llama3_8b@nemo:64K", "dgx_h100:1", "tp2 head_chunked4 tile-loss"),
    _row("llama3_8b@nemo:64K", "dgx_b200:1",
        "ulysses4 dp2 tile-loss fp8:mxfp8", variant="fp8", source=ON_B200),
    _row("llama3_8b@nemo:128K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6"),
    _row("llama3_8b@nemo:128K", "dgx_b200:1",
        "ulysses8 tile-loss fp8:mxfp8", variant="fp8", source=ON_B200),

    _row("llama2_13b@llama2_long_32k:32K", "dgx_h100:16", "tp2 ulysses4 dp16 tile-loss"),

    _row("llama2_7b@llama2_long_32k:32K", "dgx_h100:8", "ulysses8 dp8"),

    _row("llama2_70b@llama2_long_16k:16K", "dgx_h100:64", "hybrid8x4 pp8 dp2"),

    _row("llama31_405b@llama31:16K", "dgx_h100:128", "tp4 hybrid2x4 pp16 dp2"),
    _row("llama31_405b@llama31:32K", "dgx_h100:128", "tp4 hybrid2x8 pp16"),
    _row("llama31_405b@llama31:48K", "dgx_h100:256", "tp4 ulysses32 pp16"),
    _row("llama31_405b@llama31:64K", "dgx_h100:256", "tp4 hybrid2x16 pp16"),
    _row("llama31_405b@llama31:96K", "dgx_h100:256", "tp8 ring16 pp16 tile-loss"),
    _row("llama31_405b@llama31:128K", "dgx_h100:256", "tp8 ring32 pp8"),

    _row("llama3_8b@prolong:64K", "dgx_h100:1", "tp2 head_chunked4 tile-loss"),
    _row("llama3_8b@prolong:512K", "dgx_h100:4",
        "head_chunked2 dp16 kept_attention tile-loss tile-mlp offload-both:129.1"),

    _row("qwen25_7b@qwen25_1m:64K", "dgx_h100:1", "tp2 hybrid2x2 tile-loss"),
    _row("qwen25_7b@qwen25_1m:128K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:49.5"),
    _row("qwen25_7b@qwen25_1m:256K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:98.9"),

    _row("llama31_8b@ultralong_1m:1M", "dgx_h100:1",
        "ulysses8 kept_attention tile-loss tile-mlp offload-both:64.6"),

    _row("llama31_8b@ultralong_2m:2M", "dgx_h100:1",
        "tp2 ulysses4 kept_attention tile-loss tile-mlp offload-both:129.1"),

    _row("llama31_8b@ultralong_4m:4M", "dgx_h100:2",
        "tp2 hybrid4x2 kept_attention tile-loss tile-mlp offload-both:129.1"),

    _row("llama2_7b@lwm:32K", "dgx_h100:1", "ulysses8"),
    _row("llama2_7b@lwm:128K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6"),
    _row("llama2_7b@lwm:256K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:129.1"),
    _row("llama2_7b@lwm:256K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:129.1 fp8:blockwise",
        variant="fp8", source=ON_H100),
    _row("llama2_7b@lwm:512K", "dgx_h100:1",
        "head_chunked2 dp4 kept_attention tile-loss tile-mlp offload-both:129.1"),
    _row("llama2_7b@lwm:1M", "dgx_h100:1",
        "ulysses8 kept_attention tile-loss tile-mlp offload-both:64.6"),
    _row("llama2_7b@lwm:1M", "dgx_h100:1",
        "head_chunked8 kept_attention tile-loss tile-mlp offload-both:64.6 fp8:blockwise",
        variant="fp8", source=ON_H100),

    _row("llama2_7b@yarn:64K", "dgx_h100:1", "tp2 ulysses4 tile-loss"),
    _row("llama2_7b@yarn:128K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6"),

    _row("llama3_8b@longrope2:128K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6"),

    _row("llama3_8b@longrecipe_128k:38400", "dgx_h100:1", "tp2 ulysses4 tile-loss"),

    _row("llama2_7b@gene_64k:16K", "dgx_h100:1", "ulysses4 dp2"),

    _row("llama3_70b@k2v2:64K", "dgx_h100:256", "tp2 hybrid4x8 pp8 dp4"),
    _row("llama3_70b@k2v2:128K", "dgx_h100:128", "tp4 hybrid2x8 pp4 dp4 tile-loss"),
    _row("llama3_70b@k2v2:512K", "dgx_h100:128", "tp4 hybrid2x32 pp4 tile-loss"),

    _row("llama3_8b@apertus_8b:8K", "dgx_h100:2",
        "tp2 dp8", pinned="the source's layout: TP 2, no context parallelism"),
    _row("llama3_8b@apertus_8b:16K", "dgx_h100:1", "ulysses8"),
    _row("llama3_8b@apertus_8b:32K", "dgx_h100:2", "ulysses8 dp2"),
    _row("llama3_8b@apertus_8b:64K", "dgx_h100:1", "tp2 head_chunked4 tile-loss"),

    _row("llama3_70b@apertus_70b:8K", "dgx_h100:16", "tp2 hybrid4x2 pp4 dp2"),
    _row("llama3_70b@apertus_70b:16K", "dgx_h100:16", "tp2 hybrid4x4 pp4"),
    _row("llama3_70b@apertus_70b:32K", "dgx_h100:16", "tp4 hybrid2x2/2 pp4 dp2 tile-loss"),
    _row("llama3_70b@apertus_70b:64K", "dgx_h100:8",
        "tp2 ulysses4 pp4 dp2 kept_attention tile-loss offload-both:20.3"),

    _row("llama3_8b@apertus15_8b:32K", "dgx_h100:2", "ulysses8 dp2"),
    _row("llama3_8b@apertus15_8b:64K", "dgx_h100:2", "ulysses8 pp2 tile-loss"),
    _row("llama3_8b@apertus15_8b:128K", "dgx_h100:4", "hybrid8x4"),
    _row("llama3_8b@apertus15_8b:256K", "dgx_h100:8",
        "ulysses2 dp32 kept_attention tile-loss tile-mlp offload-both:64.6"),

    _row("llama3_8b@apertus15_8b_as_trained:32K", "dgx_h100:2", "ulysses8 dp2"),
    _row("llama3_8b@apertus15_8b_as_trained:64K", "dgx_h100:2", "ulysses8 pp2 tile-loss"),
    _row("llama3_8b@apertus15_8b_as_trained:128K", "dgx_h100:4", "hybrid8x4"),
    _row("llama3_8b@apertus15_8b_as_trained:256K", "dgx_h100:8",
        "ulysses2 dp32 kept_attention tile-loss tile-mlp offload-both:64.6"),

    _row("llama3_70b@apertus15_70b:32K", "dgx_h100:16", "tp4 hybrid2x2/2 pp4 dp2 tile-loss"),
    _row("llama3_70b@apertus15_70b:64K", "dgx_h100:16",
        "ulysses8 pp8 dp2 kept_attention tile-loss offload-both:20.3"),
    _row("llama3_70b@apertus15_70b:128K", "dgx_h100:32",
        "tp2 hybrid4x4 pp4 dp2 kept_attention tile-loss"),
    _row("llama3_70b@apertus15_70b:256K", "dgx_h100:32",
        "tp8 head_chunked1 dp32 kept_attention tile-loss tile-mlp offload-both:80.8"),

    _row("llama3_70b@apertus15_70b_as_trained:32K", "dgx_h100:16",
        "tp4 hybrid2x2/2 pp4 dp2 tile-loss"),
    _row("llama3_70b@apertus15_70b_as_trained:64K", "dgx_h100:16",
        "ulysses8 pp8 dp2 kept_attention tile-loss offload-both:20.3"),
    _row("llama3_70b@apertus15_70b_as_trained:128K", "dgx_h100:32",
        "tp2 hybrid4x4 pp4 dp2 kept_attention tile-loss"),
    _row("llama3_70b@apertus15_70b_as_trained:256K", "dgx_h100:32",
        "tp8 head_chunked1 dp32 kept_attention tile-loss tile-mlp offload-both:80.8"),

    _row("smollm3_4k_3b@smollm3:32K", "dgx_h100:1", "ulysses4 dp2 tile-loss"),
    _row("smollm3_4k_3b@smollm3:64K", "dgx_h100:1", "ulysses8 tile-loss"),

    _row("olmo3_8k_7b@olmo3_7b:64K", "dgx_h100:1", "tp2 ulysses4 tile-loss"),

    _row("olmo3_8k_32b@olmo3_32b:64K", "dgx_h100:8", "tp4 hybrid2x4 pp2 tile-loss"),

    _row("llama2_7b@deepseek_v3:32K", "dgx_h100:2", "ulysses8 dp2"),
    _row("llama2_7b@deepseek_v3:128K", "dgx_h100:4", "hybrid8x2 pp2 tile-loss"),

    _row("llama3_8b@minimax01:128K", "dgx_h100:16", "hybrid8x4 dp4"),
    _row("llama3_8b@minimax01:512K", "dgx_h100:8",
        "head_chunked2 dp32 kept_attention tile-loss tile-mlp offload-both:129.1"),
    _row("llama3_8b@minimax01:1M", "dgx_h100:8",
        "ulysses8 dp8 kept_attention tile-loss tile-mlp offload-both:64.6"),

    _row("mistral_7b@megabeam:300K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:151.3"),
    _row("mistral_7b@megabeam:600K", "dgx_h100:1",
        "head_chunked2 dp4 kept_attention tile-loss tile-mlp offload-both:151.3"),
    _row("mistral_7b@megabeam:50K", "dgx_h100:1", "tp2 ulysses4 tile-loss"),

    _row("llama3_8b@five_million:5M", "dgx_h200:1",
        "head_chunked8 full tile-loss tile-mlp offload-inputs:160.1",
        pinned="one node, as the source's; 80 GB a GPU hold 5,000K here"),

    _row("llama31_8b@fifteen_million:15M", "dgx_h100:8",
        "hybrid8x8/8 kept_attention tile-loss tile-mlp offload-both:121.1"),
    _row("llama31_8b@fifteen_million:15M", "dgx_h100:4",
        "tp2 hybrid1x16/1 full tile-loss tile-mlp offload-inputs:120.1",
        variant="on_32xh100", pinned="planned for the source's machine, four nodes"),

    _row("llama3_8b@llama31:16K", "dgx_h100:4", "ulysses4 dp8"),
    _row("llama3_8b@llama31:32K", "dgx_h100:4", "ulysses8 dp4"),
    _row("llama3_8b@llama31:32K", "dgx_h100:4",
        "dp32 kept_attention tile-loss tile-mlp", variant="without_cp", pinned=WITHOUT_CP),
    _row("llama3_8b@llama31:48K", "dgx_h100:4", "ulysses8 pp2 dp2 tile-loss"),
    _row("llama3_8b@llama31:64K", "dgx_h100:4", "ulysses8 pp2 dp2 tile-loss"),
    _row("llama3_8b@llama31:96K", "dgx_h100:8", "hybrid8x4 dp2"),
    _row("llama3_8b@llama31:128K", "dgx_h100:8", "hybrid8x4 dp2"),

    _row("llama31_8b@nemo:16K", "dgx_h100:1", "ulysses8"),
    _row("llama31_8b@nemo:16K", "dgx_h100:1",
        "ulysses2 pp2 dp2 tile-loss fp8:blockwise", variant="fp8", source=ON_H100),
    _row("llama31_8b@nemo:64K", "dgx_h100:1", "tp2 head_chunked4 tile-loss"),
    _row("llama31_8b@nemo:64K", "dgx_h100:1",
        "tp2 head_chunked4 tile-loss fp8:blockwise", variant="fp8", source=ON_H100),
    _row("llama31_8b@nemo:64K", "dgx_h100:1",
        "head_chunked1 kept_attention tile-loss tile-mlp offload-both:32.4 adam-on-host:0.8",
        variant="on_1xh100", pinned=ONE_GPU),
    _row("llama31_8b@nemo:128K", "dgx_h100:1",
        "head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6"),
    _row("llama31_8b@nemo:128K", "dgx_h100:1",
        "tp2 ulysses4 tile-loss tile-mlp fp8:tensorwise", variant="fp8", source=ON_ONE_H100),

    _row("llama32_1b@nemo:16K", "dgx_h100:1", "dp8 tile-loss"),
    _row("llama32_1b@nemo:64K", "dgx_h100:1", "ulysses2 dp4 tile-loss"),
    _row("llama32_1b@nemo:64K", "dgx_h100:1",
        "ulysses2 dp4 tile-loss fp8:tensorwise", variant="fp8", source=ON_ONE_H100),
    _row("llama32_1b@nemo:128K", "dgx_h100:1", "ulysses4 dp2 tile-loss"),
    _row("llama32_1b@nemo:128K", "dgx_h100:1",
        "ulysses4 dp2 tile-loss fp8:tensorwise", variant="fp8", source=ON_ONE_H100),

    _row("llama3_70b@nemo:16K", "dgx_h100:4", "tp8 ring2 pp2 tile-loss"),
    _row("llama3_70b@nemo:64K", "dgx_h100:4",
        "tp4 ulysses2 pp4 kept_attention tile-loss offload-inputs:10.1"),
    _row("llama3_70b@nemo:128K", "dgx_h100:4",
        "tp4 ulysses2 pp4 kept_attention tile-loss tile-mlp offload-both:40.5"),

    _row("mixtral_8x7b@nemo:16K", "dgx_h100:2", "tp2 ulysses4 pp2 ep8 etp1"),
    _row("mixtral_8x7b@nemo:64K", "dgx_h100:2", "ulysses8 pp2 ep8 kept_attention tile-loss"),
    _row("mixtral_8x7b@nemo:128K", "dgx_h100:2", "ulysses8 pp2 ep8 kept_attention tile-loss"),

    _row("mixtral_8x22b@nemo:16K", "dgx_h100:8", "tp4 hybrid2x2 pp4 ep8 etp1"),
    _row("mixtral_8x22b@nemo:64K", "dgx_h100:8", "hybrid8x2 pp4 ep8 kept_attention"),
    _row("mixtral_8x22b@nemo:128K", "dgx_h100:8", "hybrid8x2 pp4 ep8 kept_attention tile-loss"),

    _row("nemotron3_22b@nemo:16K", "dgx_h100:1", "tp4 head_chunked1 pp2 tile-loss"),
    _row("nemotron3_22b@nemo:64K", "dgx_h100:1",
        "tp2 pp2 dp2 kept_attention tile-loss tile-mlp offload-both:30.4"),
    _row("nemotron3_22b@nemo:128K", "dgx_h100:1",
        "tp4 head_chunked1 dp2 kept_attention tile-loss tile-mlp offload-both:30.4"),

    _row("nemotron4_15b@nemo:16K", "dgx_h100:1", "tp2 ulysses2 pp2 tile-loss"),
    _row("nemotron4_15b@nemo:64K", "dgx_h100:1",
        "tp2 ulysses4 kept_attention tile-loss offload-both:6.2"),
    _row("nemotron4_15b@nemo:128K", "dgx_h100:1", "tp4 head_chunked2 tile-loss tile-mlp"),

    _row("llama2_13b@yarn:64K", "dgx_h100:1",
        "tp2 head_chunked1 dp4 kept_attention tile-loss tile-mlp offload-inputs:12.6"),
    _row("llama2_13b@yarn:128K", "dgx_h100:1",
        "tp2 head_chunked1 dp4 kept_attention tile-loss tile-mlp offload-both:50.5"),

    _row("qwen25_14b@qwen25_1m:64K", "dgx_h100:1",
        "ulysses4 pp2 kept_attention tile-loss tile-mlp offload-both:15.3"),
    _row("qwen25_14b@qwen25_1m:128K", "dgx_h100:1",
        "tp2 head_chunked1 dp4 kept_attention tile-loss tile-mlp offload-both:60.6"),
    _row("qwen25_14b@qwen25_1m:256K", "dgx_h100:2",
        "tp2 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:121.1"),
)
# fmt: on

ROWS: dict[str, Row] = {row.name: row for row in _TABLE}
"""Every row by its name, in the order of this file."""
