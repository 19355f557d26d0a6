# SPDX-License-Identifier: Apache-2.0
"""A layout as a line of words, the way rows of the collection and the planner write it.

    tp2 ulysses4 dp8 kept_attention tile-loss tile-mlp offload-both:64

| word | |
| --- | --- |
| `tp2` `pp2` `dp8` `mb2` | sizes; `mb` is the micro-batch |
| `ulysses4` `ring8` `head_chunked8` `head_chunked8/16` | context parallelism, heads a stage |
| `hybrid4x8` `hybrid4x8/8` | all-to-all inside, ring outside, heads a stage |
| `full` `kept_attention` `selective:mlp` | recompute |
| `tile-loss` `tile-mlp` | tiling, of the usual tiles |
| `offload-inputs:64` `offload-both:64` | host offload and its cap in GiB |
| `zero0` `zero2` `zero3` | sharding; the distributed optimizer (ZeRO-1) goes without saying |
| `adam-on-host:0.5` | the optimizer's share on the host |
| `fp8:tensorwise` `cpu` `fp32` | precision and device |
"""

import re
from typing import Any, cast

from custom_modules.activation_memory import Offload, OffloadedTensors, Recompute, Tiling
from recipes.layout import ContextParallel, Fp8, Fp8Recipe, Layout, Sharding

_SIZES = {"tp": "tp", "pp": "pp", "dp": "dp", "mb": "micro_batch"}
_SHARDING: dict[str, Sharding] = {"zero0": "none", "zero2": "gradients", "zero3": "parameters"}
_CP = re.compile(r"(ulysses|ring|head_chunked|hybrid)(\d+)(?:x(\d+))?(?:/(\d+))?")


def layout_from(line: str) -> Layout:
    """Return the layout that a line says; raise ValueError for a word that says nothing."""
    fields: dict[str, Any] = {}
    for word in line.split():
        fields |= _meant(word, fields)
    return Layout(**fields)


def _meant(word: str, before: dict[str, Any]) -> dict[str, Any]:
    size = re.fullmatch(r"(tp|pp|dp|mb)(\d+)", word)
    if size:
        return {_SIZES[size[1]]: int(size[2])}
    if shared := _CP.fullmatch(word):
        return {"cp": _context_parallel(shared)}
    name, _, value = word.partition(":")
    if name in ("full", "kept_attention"):
        return {"recompute": Recompute(kind=cast(Any, name))}
    if name == "selective":
        return {"recompute": Recompute(kind="selective", modules=value.split(","))}
    if name in ("tile-loss", "tile-mlp"):
        tiling: Tiling = before.get("tiling", Tiling())
        loss, mlp = tiling.loss or name == "tile-loss", tiling.mlp or name == "tile-mlp"
        return {"tiling": Tiling(loss=loss, mlp=mlp)}
    if name.startswith("offload-"):
        tensors = cast(OffloadedTensors, name.removeprefix("offload-"))
        return {"offload": Offload(tensors=tensors, cap_gib=float(value))}
    if name in _SHARDING:
        return {"sharding": _SHARDING[name]}
    if name == "adam-on-host":
        return {"optimizer_offload": float(value)}
    if name == "fp8":
        return {"fp8": Fp8(recipe=cast(Fp8Recipe, value))}
    if name in ("cpu", "fp32"):
        return {"device": "cpu"} if name == "cpu" else {"precision": "fp32"}
    raise ValueError(f"{word!r} says nothing of a layout; see recipes.layout_words")


def _context_parallel(found: re.Match[str]) -> ContextParallel:
    kind, first, second, stage = found.groups()
    heads = int(stage) if stage else None
    if kind == "hybrid":
        return ContextParallel.hybrid(
            ulysses=int(first), ring=int(second or 1), heads_per_stage=heads
        )
    if kind == "head_chunked":
        return ContextParallel.head_chunked(int(first), heads_per_stage=heads)
    made: ContextParallel = getattr(ContextParallel, kind)(int(first))
    return made


def words_of(layout: Layout) -> str:
    """Return the line that `layout_from` reads; sizes of 1 and usual choices are left out."""
    found = [f"{word}{getattr(layout, name)}" for word, name in _SIZES.items()]
    said = [word for word in found if not word.endswith(("p1", "b1"))]
    how, size = layout.cp.how, layout.cp.size
    if size > 1 or how.kind == "head_chunked":
        stage = f"/{how.heads_per_stage}" if how.heads_per_stage else ""
        sizes = f"{how.ulysses}x{size // how.ulysses}" if how.ulysses else f"{size}"
        said.insert(1 if layout.tp > 1 else 0, f"{how.kind}{sizes}{stage}")
    if layout.recompute.kind != "none":
        modules = ",".join(layout.recompute.modules)
        said.append(layout.recompute.kind + (f":{modules}" if modules else ""))
    said += [f"tile-{part}" for part in ("loss", "mlp") if getattr(layout.tiling, part)]
    if layout.offload.tensors != "none":
        said.append(f"offload-{layout.offload.tensors}:{layout.offload.cap_gib:g}")
    said += [word for word, kind in _SHARDING.items() if layout.sharding == kind]
    if layout.optimizer_offload:
        said.append(f"adam-on-host:{layout.optimizer_offload:g}")
    if layout.fp8.recipe != "none":
        said.append(f"fp8:{layout.fp8.recipe}")
    said += ["fp32"] * (layout.precision == "fp32") + ["cpu"] * (layout.device == "cpu")
    return " ".join(said) or "one rank"
