# SPDX-License-Identifier: Apache-2.0
"""Tiles and the cap on offload of a rehearsal's layout, as tight as those of the whole one."""

from dataclasses import replace
from math import ceil
from typing import Any

from custom_modules.memory.config import Offload, SavedTensors
from recipes.rehearsal.shrink import LAYERS_OF_RANK
from recipes.spec import pipeline
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Stage
from recipes.spec.units import GiB


def micro_batches(stage: Stage, layout: Layout) -> int:
    """Return the micro-batches per step on a data rank."""
    return stage.sequences_per_batch // (layout.micro_batch * layout.dp)


def fit_tiles(
    small: Layout, whole: Layout, *, cards: tuple[ModelCard, ModelCard], stages: tuple[Stage, Stage]
) -> Layout:
    """Return the small layout with as many tiles, up to 4, and as tight a cap on offload.

    `cards` and `stages` are each the full and the small one.
    """
    tiling, offload = whole.tiling, whole.offload
    there = stages[1].seq_length // small.cp.size * small.micro_batch
    before = stages[0].seq_length // whole.cp.size * whole.micro_batch
    tiles = {
        "loss_tile": _tile(tiling.loss, tiling.loss_tile, before, there),
        "mlp_tile": _tile(tiling.mlp, tiling.mlp_tile, before // whole.tp, there // small.tp),
    }
    if offload.tensors != "none":
        every = min(offload.every, LAYERS_OF_RANK)
        offload = replace(offload, every=every)
        needed = _on_host(offload, small, cards[1], stages[1])
        of_whole = _on_host(whole.offload, whole, cards[0], stages[0])
        cap = max(needed, round(needed * whole.offload.cap_gib * GiB / max(1, of_whole)))
        offload = replace(offload, cap_gib=(cap + 1) / GiB)
    changed: dict[str, Any] = {name: tile for name, tile in tiles.items() if tile is not None}
    return replace(small, tiling=replace(tiling, **changed), offload=offload)


def _tile(tiled: bool, tile: int, before: int, there: int) -> int | None:
    """Return the tile that splits `there` tokens as `tile` splits `before`; None if not tiled."""
    return ceil(there / min(4, ceil(before / tile))) if tiled else None


def _on_host(offload: Offload, layout: Layout, card: ModelCard, stage: Stage) -> int:
    """Return the largest host bytes of a rank, as `recipes.constraints.memory` counts them."""
    saved = SavedTensors(
        tokens=stage.seq_length // layout.cp.size * layout.micro_batch,
        hidden=card.hidden,
        heads=card.heads // layout.tp,
        head_dim=card.head_dim,
        tp=layout.tp,
        element_bytes=2 if layout.precision == "bf16" else 4,
    )
    in_flight = min(layout.pp, micro_batches(stage, layout))
    return max(
        saved.on_host(offload, layout.recompute, layers=layers, in_flight=in_flight)
        for layers in pipeline.stages(card.layers, layout.pp)
    )
