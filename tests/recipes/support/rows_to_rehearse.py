# SPDX-License-Identifier: Apache-2.0
"""Rows that no collection has to hold: one for each structure that a rehearsal keeps."""

from dataclasses import replace

from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.gene import gene_rotation
from recipes.models import CARDS, LLAMA31_8B, TINY
from recipes.shipped.row import Row
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.train_short import Positions
from recipes.spec.units import K, M

MIXTRAL = replace(
    LLAMA31_8B, name="mixtral", family="mixtral", experts=8, experts_per_token=2, head_dim=128,
    native_context=32 * K, native_rope=RopeScaling.base_change(1_000_000),
)  # fmt: skip
LLAMA2 = replace(
    LLAMA31_8B, name="llama2", kv_heads=32, vocab=32_000, native_context=4 * K,
    native_rope=RopeScaling.base_change(10_000),
)  # fmt: skip
KEPT = Recompute(kind="kept_attention")


def stage(seq_length: int, **changed) -> Stage:
    """Return a stage of 100 steps that starts from the card's weights at its native rotation."""
    batch = max(4 * M, seq_length) // seq_length * seq_length
    given = {
        "rope": "native", "tokens": 100 * batch, "tokens_per_batch": batch,
        "lr": Cosine(peak=1e-5), "start": "card",
    }  # fmt: skip
    return Stage(seq_length=seq_length, **(given | changed))


def row(name: str, *stages: Stage, card=LLAMA31_8B, nodes: int = 1, **layout) -> Row:
    """Return the row of the last stage of a ladder with that name."""
    return Row(
        card=card, ladder=Ladder(name=name, source="a test", stages=stages),
        seq_length=stages[-1].seq_length, layout=Layout(**layout), nodes=nodes,
        cluster="dgx_h100", pinned="a test",
    )  # fmt: skip


def _longrope() -> RopeScaling:
    divisors = [1 + pair / 8 for pair in range(64)]
    return RopeScaling(
        method="longrope", base=500_000, factor=16, original_length=8 * K,
        short_factor=[1.0] * 64, long_factor=divisors,
    )  # fmt: skip


_YARN = RopeScaling.yarn(
    base=500_000, factor=32.0, original_length=128 * K, before=LLAMA31_8B.native_rope
)
_SHARED = (stage(16 * K), stage(64 * K, start="previous"))
_ROWS = (
    row("first", *_SHARED[:1], tp=2, dp=2, cp=ContextParallel.ulysses(2)),
    row("second", *_SHARED, tp=2, cp=ContextParallel.ulysses(4)),
    row(
        "chunked", stage(1 * M), stage(5 * M, start="previous"),
        cp=ContextParallel.head_chunked(8), recompute=KEPT,
        tiling=Tiling(loss=True, mlp=True), offload=Offload(tensors="inputs", cap_gib=200.0),
    ),
    row(
        "hybrid", stage(4 * M, rope=_YARN), nodes=4,
        cp=ContextParallel.hybrid(ulysses=8, ring=4), recompute=KEPT, tiling=Tiling(loss=True),
    ),
    row(
        "hybridchunked", stage(4 * M), nodes=4, recompute=Recompute(kind="full"),
        cp=ContextParallel.hybrid(ulysses=8, ring=4, heads_per_stage=16),
    ),
    row("auto", stage(1 * M), nodes=8, tp=2, cp=ContextParallel.auto(32)),
    row(
        "windows", stage(64 * K, rope=CARDS["olmo3_7b"].native_rope), card=CARDS["olmo3_8k_7b"],
        tp=2, pp=4, cp=ContextParallel.ring(2), nodes=2,
    ),
    row("two_rotations", stage(1 * M), card=CARDS["gemma3_1b"], cp=ContextParallel.ring(8)),
    row(
        "unrotated", stage(32 * K), stage(64 * K, start="previous"), card=CARDS["smollm3_4k_3b"],
        pp=2, dp=4, recompute=KEPT,
    ),
    row(
        "pipeline", stage(32 * K), stage(64 * K, start="previous"), tp=2, pp=4, dp=2,
        recompute=Recompute(kind="block", layers=3),
    ),
    row(
        "interleaved", stage(32 * K), stage(64 * K, start="previous"), tp=2, pp=4, vpp=4,
        recompute=KEPT,
    ),
    row(
        "everything", stage(128 * K, documents="within"), nodes=128, tp=8, pp=4, dp=4,
        cp=ContextParallel.hybrid(ulysses=2, ring=4),
        recompute=Recompute(kind="kept_attention", every=4, others="full"),
        offload=Offload(tensors="both", cap_gib=300.0, every=2),
    ),
    row("experts", stage(64 * K), card=MIXTRAL, tp=2, cp=ContextParallel.ring(4)),
    row(
        "divided", stage(64 * K), card=MIXTRAL, nodes=2, tp=2, dp=2, cp=ContextParallel.ulysses(4),
        ep=8, etp=1, recompute=KEPT,
    ),
    row("longrope", stage(128 * K, rope=_longrope()), cp=ContextParallel.ulysses(4), dp=2),
    row(
        "pose", stage(2 * K, positions=Positions.pose(128 * K)), card=LLAMA2, dp=8, micro_batch=4,
    ),
    row(
        "same", stage(4 * K, positions=Positions.pose(128 * K, chunks=3)), card=LLAMA2, dp=8,
    ),
    row(
        "gene", stage(16 * K, positions=Positions.gene(128 * K), rope=gene_rotation(
            base=500_000, factor=16.0, original_length=8 * K, head_dim=128)),
        cp=ContextParallel.ulysses(2), dp=2,
    ),
    row("longrecipe", stage(24 * K, positions=Positions.longrecipe(80 * K)), card=LLAMA2, dp=2),
    row(
        "gpuonly", stage(64 * K), stage(256 * K, start="previous"), nodes=2,
        cp=ContextParallel.transformer_engine_hybrid(a2a=4, p2p=2), dp=2,
        sharding="parameters", fp8=Fp8(recipe="tensorwise"),
    ),
    row("offloaded", stage(64 * K), dp=8, optimizer_offload=0.5, fp8=Fp8(recipe="delayed")),
    row("wide", stage(15 * M), nodes=4, cp=ContextParallel.head_chunked(32, heads_per_stage=32)),
    row("scratch", stage(4 * K, start="scratch"), card=replace(TINY, name="small"), dp=2),
)  # fmt: skip
ROWS_TO_REHEARSE: dict[str, Row] = {made.ladder.name: made for made in _ROWS}
