# SPDX-License-Identifier: Apache-2.0
"""Layouts whose activation bytes are counted in a step, and asked of the planner.

A case is a model, a layout on CPU ranks and a length. `measured` runs the recipe's step on this
rank, `predicted` asks the planner; both leave out weights, gradients and optimizer.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.profiling.categories import Category
from recipes.models import LLAMA31_8B, TINY
from recipes.models.gemma3 import GEMMA3_1B
from recipes.models.olmo3 import OLMO3_7B
from recipes.models.qwen import QWEN3_8B
from recipes.models.smollm3 import SMOLLM3_3B
from recipes.planner.kernels import PLAIN
from recipes.planner.memory import Memory, memory
from recipes.planner.workload import Workload
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Cosine, DocumentPolicy, Ladder, Stage

SCALE, LAYERS, TILE = 16, 4, 256


def _sixteenth(card: ModelCard) -> ModelCard:
    """Return a card with its widths, vocabulary and window divided by 16, and four layers or so.

    Where layers differ, there are as many as from one full layer to the next.
    """
    pattern = card.pattern
    if pattern is not None and pattern.window is not None:
        pattern = replace(pattern, window=pattern.window // SCALE)
    return replace(
        card,
        name=f"{card.name}_sixteenth",
        pattern=pattern,
        layers=LAYERS if pattern is None else pattern.every,
        hidden=card.hidden // SCALE,
        ffn_hidden=card.ffn_hidden // SCALE,
        head_dim=card.head_dim // SCALE,
        vocab=card.vocab // SCALE,
        hf_id=None,
    )


WHOLE = (LLAMA31_8B, QWEN3_8B, SMOLLM3_3B, OLMO3_7B, GEMMA3_1B)
CARDS = {card.name: card for card in (replace(TINY, layers=4), *map(_sixteenth, WHOLE))}
STATE: tuple[Category, ...] = ("weights", "gradients", "optimizer", "host")
"""Causes that are not activations of the device."""

LOSS = Tiling(loss=True, loss_tile=TILE)
MLP = Tiling(mlp=True, mlp_tile=TILE)
BOTH = Tiling(loss=True, loss_tile=TILE, mlp=True, mlp_tile=TILE)
TILINGS = {"": Tiling(), "; loss tiled": LOSS, "; mlp tiled": MLP, "; loss, mlp tiled": BOTH}
ENDS = {"": Tiling(), "; loss, mlp tiled": BOTH}
FULL, KEPT = Recompute(kind="full"), Recompute(kind="kept_attention")
RECOMPUTES = {
    "none": Recompute(),
    "full": FULL,
    "kept attention": KEPT,
    "selective core_attn": Recompute(kind="selective", modules=["core_attn"]),
    "selective mlp": Recompute(kind="selective", modules=["mlp"]),
    "uniform 1": Recompute(kind="uniform", layers=1),
    "uniform 2": Recompute(kind="uniform", layers=2),
    "block 2": Recompute(kind="block", layers=2),
    "kept every 2, full": Recompute(kind="kept_attention", every=2, others="full"),
    "full every 2, none": Recompute(kind="full", every=2),
}
INPUTS = Offload(tensors="inputs", cap_gib=4)
EVERYTHING = Offload(tensors="both", cap_gib=4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step that is measured and predicted."""

    name: str
    card: str
    layout: Layout
    tokens: int
    """Of a sequence on a context rank."""
    documents: DocumentPolicy = "across"

    @property
    def workload(self) -> Workload:
        """The same for the planner: as many micro-batches as are under way in the pipeline."""
        layout, seq_length = self.layout, self.tokens * self.layout.cp.size
        return Workload(
            card=CARDS[self.card],
            seq_length=seq_length,
            tokens_per_batch=seq_length * layout.micro_batch * layout.dp * layout.pp,
            layout=layout,
            gpus_per_node=8,
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank held when most was live."""

    categories: dict[Category, int]
    peak_bytes: int
    peak_in: str

    @property
    def activations(self) -> int:
        """Bytes that depend on the tokens."""
        return sum(size for name, size in self.categories.items() if name not in STATE)


def one_rank(card: str, tokens: int) -> Iterator[Case]:
    """Yield recompute of every kind, with every tiling; offload; documents; a larger batch."""
    for name, recompute in RECOMPUTES.items():
        ours = recompute.every == 1 and recompute.kind in ("none", "full", "kept_attention")
        found = TILINGS if ours else ENDS
        if "mlp" in recompute.modules:  # a tiled MLP, rebuilt already, would be refused
            found = {"": Tiling(), "; loss tiled": LOSS}
        for how, tiling in found.items():
            yield _case(card, tokens, name + how, recompute=recompute, tiling=tiling)
    for name, recompute in {"full": FULL, "kept attention": KEPT}.items():
        tiled = {"recompute": recompute, "tiling": BOTH}
        yield _case(card, tokens, f"{name}; loss, mlp tiled; inputs away", **tiled, offload=INPUTS)
    for name, cp in {
        "": ContextParallel.ulysses(1),
        "; a head at a time": ContextParallel.head_chunked(1),
    }.items():
        kept = {"recompute": KEPT, "cp": cp}
        if cp.how.kind == "head_chunked":
            yield _case(card, tokens, f"none{name}", cp=cp)
            yield _case(card, tokens, f"kept attention; loss, mlp tiled{name}", tiling=BOTH, **kept)
        away = {**kept, "tiling": BOTH, "offload": EVERYTHING}
        yield _case(card, tokens, f"kept attention; loss, mlp tiled; both away{name}", **away)
    plain: dict[str, dict[str, Any]] = {"none": {}, "kept; tiled": _tiled(KEPT)}
    for name, given in plain.items():
        half = _case(card, tokens // 2, f"{name}; micro-batch 2", micro_batch=2, **given)
        yield half
        yield replace(_case(card, tokens, f"{name}; documents within", **given), documents="within")


def two_ranks(card: str, tokens: int) -> Iterator[Case]:
    """Yield every kind of parallelism on two ranks."""
    heads = CARDS[card].heads
    kinds = {
        "ulysses 2": ContextParallel.ulysses(2),
        "ring 2": ContextParallel.ring(2),
        "head-chunked 2": ContextParallel.head_chunked(2),
        "head-chunked 2, half": ContextParallel.head_chunked(2, heads_per_stage=heads // 2),
        "head-chunked 2, all": ContextParallel.head_chunked(2, heads_per_stage=heads),
    }
    yield from _kinds(card, tokens, kinds)
    ways: dict[str, dict[str, Any]] = {
        "none": {}, "none; loss tiled": {"tiling": LOSS},
        "full": {"recompute": FULL}, "full; tiled": _tiled(FULL),
        "kept attention": {"recompute": KEPT}, "kept; tiled": _tiled(KEPT),
    }  # fmt: skip
    for name, given in ways.items():
        yield _case(card, tokens, f"TP 2; {name}", tp=2, **given)
    for name in ("none", "full; tiled"):
        yield _case(card, tokens, f"PP 2; {name}", pp=2, **ways[name])
        yield _case(card, tokens, f"PP 2 x 2; {name}", pp=2, vpp=2, **ways[name])
    for name in ("none", "kept; tiled"):
        yield _case(card, tokens, f"DP 2; {name}", dp=2, **ways[name])
    twice = {"cp": ContextParallel.ulysses(2), "micro_batch": 2, **_tiled(KEPT)}
    yield _case(card, tokens // 2, "ulysses 2; kept; tiled; micro-batch 2", **twice)


def four_ranks(card: str, tokens: int) -> Iterator[Case]:
    """Yield rings of four, the hybrids, and tensor with context parallelism."""
    kinds = {
        "ring 4": ContextParallel.ring(4),
        "hybrid 2 x 2": ContextParallel.hybrid(ulysses=2, ring=2),
        "hybrid 2 x 2, 2 heads": ContextParallel.hybrid(ulysses=2, ring=2, heads_per_stage=2),
    }
    yield from _kinds(card, tokens, kinds)
    both = {"tp": 2, "cp": ContextParallel.ulysses(2)}
    yield _case(card, tokens, "TP 2 x ulysses 2; kept; tiled", **both, **_tiled(KEPT))


def _kinds(card: str, tokens: int, kinds: dict[str, ContextParallel]) -> Iterator[Case]:
    """Yield each kind where the MLP and where attention holds the most."""
    for name, cp in kinds.items():
        yield _case(card, tokens, f"{name}; none; loss tiled", cp=cp, tiling=LOSS)
        yield _case(card, tokens, f"{name}; full; tiled", cp=cp, **_tiled(FULL))
        yield _case(card, tokens, f"{name}; kept; tiled", cp=cp, **_tiled(KEPT))
        away = {**_tiled(KEPT), "offload": EVERYTHING}
        yield _case(card, tokens, f"{name}; kept; tiled; away", cp=cp, **away)


def _tiled(recompute: Recompute) -> dict[str, Any]:
    return {"recompute": recompute, "tiling": BOTH}


def _case(card: str, tokens: int, name: str, **layout: Any) -> Case:
    on_cpu = Layout(precision="fp32", device="cpu", **layout)
    return Case(name=name, card=card, layout=on_cpu, tokens=tokens)


def predicted(case: Case) -> Memory:
    """Return what the planner says of plain PyTorch operators."""
    return memory(case.workload, PLAIN)


def measured(cases: Sequence[Case]) -> list[Found]:
    """Run a step of each case on this rank and return what it held."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from custom_modules.cpu.backend import cpu_backend
    from custom_modules.profiling.step_memory import measure
    from recipes.pretrain import pretrain
    from recipes.resolved.single_step import training

    rank, found = dist.get_rank(), []
    with cpu_backend(force=True):
        for case in cases:
            recipe = pretrain(
                CARDS[case.card], _ladder(case), case.workload.seq_length, case.layout
            )
            build = partial(training, recipe, rank=rank, local_rank=rank)
            held = measure(build, torch.device("cpu"))
            parallel_state.destroy_model_parallel()
            gc.collect()
            name, backward = held.peak_in
            found.append(
                Found(
                    categories=held.at_peak,
                    peak_bytes=held.peak_bytes,
                    peak_in=f"{name}, backward" if backward else name,
                )
            )
    return found


def fullest(of_ranks: Sequence[Sequence[Found]]) -> list[Found]:
    """Return for each case what the rank held that held most."""
    by_case = zip(*of_ranks, strict=True)
    return [max(ranks, key=lambda found: found.peak_bytes) for ranks in by_case]


def _ladder(case: Case) -> Ladder:
    workload = case.workload
    stage = Stage(
        seq_length=workload.seq_length,
        rope="native",
        tokens=workload.tokens_per_batch,
        tokens_per_batch=workload.tokens_per_batch,
        lr=Cosine(peak=1e-3),
        documents=case.documents,
        start="scratch",
    )
    return Ladder(name="measured", source="ours", stages=(stage,))
