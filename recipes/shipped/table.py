# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes as rows: a stage of a ladder, a card, and the layout that fits; light.

Each row is one that a source or a measurement stands behind; any other combination of card, ladder
and stage is `longhaul pretrain --card --ladder --stage`. `recipes.shipped.factories` makes the
recipes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import length_from, recipe_name
from recipes.spec.stage import Ladder, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One shipped recipe."""

    card: ModelCard
    ladder: Ladder
    seq_length: int
    layout: Layout
    nodes: int = 1
    cluster: str
    """Name of the cluster file it is laid out for; `local` for CPU ranks."""
    source: str
    """What stands behind the layout."""
    heading: str = ""
    """Its card, ladder and cluster as the table has them."""
    planned: bool = False
    """Whether the planner chose nodes and layout, by the rule of `recipes.shipped.regenerate`."""

    @property
    def stage(self) -> Stage:
        """The stage of the ladder."""
        return self.ladder[self.seq_length]

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        return recipe_name(self.card, self.ladder, self.stage)

    def on(self, nodes: int) -> Layout:
        """Return the layout with as many data ranks as `nodes` nodes have room for.

        CPU ranks stay as many as they are, spread over the nodes. Raises ValueError where the nodes
        do not hold a whole number of replicas.
        """
        if self.layout.device == "cpu":
            return self.layout
        dp, rest = divmod(self.layout.dp * nodes, self.nodes)
        if rest or not dp:
            model_ranks = self.layout.world_size // self.layout.dp
            raise ValueError(
                f"{self.name} takes {model_ranks} ranks a replica; {nodes} nodes of "
                f"{self.layout.world_size // self.nodes} do not hold a whole number of them"
            )
        return replace(self.layout, dp=dp)


MEASURED = "measured on two CPU cores"
PLANNED = "planned: the fewest nodes, from {cluster}, that end the stage in ten days"

_TABLE = """
tiny tiny local
  512 1 dp2 mb4 fp32 cpu
  2k 1 ulysses2 fp32 cpu
  8k 1 ulysses2 fp32 cpu
llama3_8b nemo dgx_h100
  16k 1 ulysses8
  64k 1 tp2 head_chunked4 tile-loss
  128k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6
llama2_13b llama2_long_32k dgx_h100
  32k 16 tp2 ulysses4 dp16 tile-loss
llama2_7b llama2_long_32k dgx_h100
  32k 8 ulysses8 dp8
llama2_70b llama2_long_16k dgx_h100
  16k 64 hybrid8x4 pp8 dp2
llama31_405b llama31 dgx_h100
  16k 112 tp4 hybrid2x8 pp14
  32k 224 tp4 ulysses32 pp14
  48k 224 tp4 hybrid2x16 pp14
  64k 224 tp8 ulysses16 pp14
  96k 224 tp8 ring32 pp7
  128k 224 tp4 hybrid2x16 pp14 kept_attention
llama3_8b prolong dgx_h100
  64k 1 tp2 head_chunked4 tile-loss
  512k 4 ulysses2 dp16 kept_attention tile-loss tile-mlp offload-both:129.1
qwen25_7b qwen25_1m dgx_h100
  64k 1 tp2 hybrid2x2 tile-loss
  128k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:49.5
  256k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:98.9
llama31_8b ultralong_1m dgx_h100
  1m 1 ulysses8 kept_attention tile-loss tile-mlp offload-both:64.6
llama31_8b ultralong_2m dgx_h100
  2m 1 tp2 ulysses4 kept_attention tile-loss tile-mlp offload-both:129.1
llama31_8b ultralong_4m dgx_h100
  4m 2 tp2 hybrid4x2 kept_attention tile-loss tile-mlp offload-both:129.1
llama2_7b lwm dgx_h100
  32k 1 ulysses8
  128k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6
  256k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:129.1
  512k 1 head_chunked2 dp4 kept_attention tile-loss tile-mlp offload-both:129.1
  1m 1 ulysses8 kept_attention tile-loss tile-mlp offload-both:64.6
llama2_7b yarn dgx_h100
  64k 1 tp2 ulysses4 tile-loss
  128k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6
llama3_8b longrope2 dgx_h100
  128k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6
llama3_8b longrecipe_128k dgx_h100
  38400 1 tp2 ulysses4 tile-loss
llama2_7b gene_64k dgx_h100
  16k 1 ulysses4 dp2
llama3_8b five_million dgx_h200 # one node, as the source's; 80 GB a GPU hold 3.5M here
  5m 1 head_chunked8 full tile-loss tile-mlp offload-inputs:160.1
llama31_8b fifteen_million dgx_h100
  15m 8 hybrid8x8/8 kept_attention tile-loss tile-mlp offload-both:121.1
llama3_8b llama31 dgx_h100
  16k 4 ulysses4 dp8
  32k 4 ulysses8 dp4
  48k 4 ulysses8 pp2 dp2 tile-loss
  64k 4 ulysses8 pp2 dp2 tile-loss
  96k 8 hybrid8x4 dp2
  128k 8 hybrid8x4 dp2
llama31_8b nemo dgx_h100
  16k 1 ulysses8
  64k 1 tp2 head_chunked4 tile-loss
  128k 1 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:64.6
llama32_1b nemo dgx_h100
  16k 1 dp8 tile-loss
  64k 1 ulysses2 dp4 tile-loss
  128k 1 ulysses4 dp2 tile-loss
llama3_70b nemo dgx_h100
  16k 4 tp8 ring2 pp2 tile-loss
  64k 4 tp4 ulysses2 pp4 kept_attention tile-loss offload-inputs:10.1
  128k 4 tp4 ulysses2 pp4 kept_attention tile-loss tile-mlp offload-both:40.5
mixtral_8x7b nemo dgx_h100
  16k 2 ulysses2 pp8 kept_attention tile-loss offload-inputs:2.1
  64k 2 tp2 head_chunked1 pp8 kept_attention tile-loss offload-inputs:8.1
  128k 2 tp4 head_chunked1 pp4 kept_attention tile-loss offload-both:16.3
mixtral_8x22b nemo dgx_h100
  16k 8 tp4 ulysses2 pp8 kept_attention tile-loss
  64k 8 tp4 ulysses2 pp8 kept_attention tile-loss
  128k 8 tp4 ulysses2 pp8 kept_attention tile-loss offload-inputs:10.6
nemotron3_22b nemo dgx_h100
  16k 1 tp4 head_chunked1 pp2 tile-loss
  64k 1 tp2 pp2 dp2 kept_attention tile-loss tile-mlp offload-both:30.4
  128k 1 tp4 head_chunked1 dp2 kept_attention tile-loss tile-mlp offload-both:30.4
nemotron4_15b nemo dgx_h100
  16k 1 tp2 ulysses2 pp2 tile-loss
  64k 1 tp2 ulysses4 kept_attention tile-loss offload-both:6.2
  128k 1 tp4 head_chunked2 tile-loss tile-mlp
llama2_13b yarn dgx_h100
  64k 1 tp2 dp4 kept_attention tile-loss tile-mlp offload-both:25.3
  128k 1 tp2 head_chunked1 dp4 kept_attention tile-loss tile-mlp offload-both:50.5
qwen25_14b qwen25_1m dgx_h100
  64k 1 ulysses4 pp2 kept_attention tile-loss tile-mlp offload-both:15.3
  128k 1 tp2 head_chunked1 dp4 kept_attention tile-loss tile-mlp offload-both:60.6
  256k 2 tp2 head_chunked1 dp8 kept_attention tile-loss tile-mlp offload-both:121.1
"""
"""A card, a ladder and a cluster, and after # what says the layout where the planner does not; then
a stage a line: length, nodes, and the layout in words (`recipes.notation.layout`), which
`recipes.shipped.regenerate` writes."""


def _rows() -> Iterator[Row]:
    card = ladder = cluster = why = heading = ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            heading = line
            names, _, why = line.partition(" # ")
            card, ladder, cluster = names.split()
            continue
        length, nodes, words = line.split(maxsplit=2)
        layout = layout_from(words)
        yield Row(
            card=CARDS[card],
            ladder=LADDERS[ladder],
            seq_length=length_from(length),
            layout=layout,
            nodes=int(nodes),
            cluster=cluster,
            source=why or (MEASURED if layout.device == "cpu" else PLANNED.format(cluster=cluster)),
            heading=heading,
            planned=not why and layout.device != "cpu",
        )


ROWS: dict[str, Row] = {row.name: row for row in _rows()}
