# SPDX-License-Identifier: Apache-2.0
"""A layout as a line of words, as commands print it and `--layout` reads it.

    tp2 ulysses4 dp8 kept_attention tile-loss tile-mlp offload-both:64

| word | |
| --- | --- |
| `tp2` `pp2` `dp8` `mb2` | sizes; `mb` is the micro-batch |
| `pp4x2` | interleaved pipeline: 4 ranks, each with 2 chunks of layers |
| `ep8` `etp1` | expert parallel ranks, and tensor parallel ranks of an expert if not TP |
| `ulysses4` `ring8` `head_chunked8` `head_chunked8/16` | context parallelism, heads per stage |
| `hybrid4x8` `hybrid4x8/8` | all-to-all inside, ring outside, heads per stage |
| `full` `kept_attention` `selective:mlp` | recompute |
| `tile-loss` `tile-mlp` | tiling, with the default tiles |
| `offload-inputs:64` `offload-both:64` | host offload and its cap in GiB |
| `zero0` `zero2` `zero3` | sharding; the default is the distributed optimizer (ZeRO-1) |
| `adam-on-host:0.5` | the optimizer's share on the host; weights and gradients stay on the GPU |
| `fp8:tensorwise` `fp8:tensorwise:1,1` | FP8, and how many layers at each end are in bf16 |
| `cpu` `fp32` | device and precision |
| `one rank` | on its own: none of the above |
"""

import re
from typing import Any, cast, get_args

from custom_modules.memory.config import Offload, OffloadedTensors, Recompute, Tiling
from recipes.spec.layout import ContextParallel, Fp8, Fp8Recipe, Layout, Sharding

_SIZES = {"tp": "tp", "pp": "pp", "dp": "dp", "ep": "ep", "etp": "etp", "mb": "micro_batch"}
_SHARDING: dict[str, Sharding] = {"zero0": "none", "zero2": "gradients", "zero3": "parameters"}
ONE_RANK = "one rank"
WITH_VALUE = ("selective", "adam-on-host", "fp8")
_CP = re.compile(r"(ulysses|ring|head_chunked|hybrid)(\d+)(?:x(\d+))?(?:/(\d+))?")


def layout_from(line: str) -> Layout:
    """Return the layout that a line describes; raise ValueError for an unknown or repeated word."""
    fields: dict[str, Any] = {}
    for word in line.split() if line.strip() != ONE_RANK else ():
        meant = _meant(word, fields)
        if again := (meant.keys() & fields.keys()) - {"tiling"}:
            raise ValueError(f"{word!r} sets {again.pop()} again; leave one of them out")
        fields |= meant
    return Layout(**fields)


def _meant(word: str, before: dict[str, Any]) -> dict[str, Any]:
    size = re.fullmatch(rf"({'|'.join(_SIZES)})(\d+)", word)
    if size:
        return {_SIZES[size[1]]: int(size[2])}
    if chunks := re.fullmatch(r"pp(\d+)x(\d+)", word):
        return {"pp": int(chunks[1]), "vpp": int(chunks[2])}
    if shared := _CP.fullmatch(word):
        return {"cp": _context_parallel(shared)}
    name, colon, value = word.partition(":")
    if colon and name not in WITH_VALUE and not name.startswith("offload-"):
        raise ValueError(_nothing(word))
    if name in ("full", "kept_attention"):
        return {"recompute": Recompute(kind=cast(Any, name))}
    if name == "selective":
        return {"recompute": Recompute(kind="selective", modules=value.split(","))}
    if name in ("tile-loss", "tile-mlp"):
        tiling: Tiling = before.get("tiling", Tiling())
        loss, mlp = tiling.loss or name == "tile-loss", tiling.mlp or name == "tile-mlp"
        return {"tiling": Tiling(loss=loss, mlp=mlp)}
    if name in ("offload-inputs", "offload-both"):
        tensors = cast(OffloadedTensors, name.removeprefix("offload-"))
        return {"offload": Offload(tensors=tensors, cap_gib=_number(word, value, "GiB"))}
    if name in _SHARDING:
        return {"sharding": _SHARDING[name]}
    if name == "adam-on-host":
        return {"optimizer_offload": _number(word, value, "share")}
    if of_fp8 := re.fullmatch(rf"fp8:({'|'.join(get_args(Fp8Recipe))})(?::(\d+),(\d+))?", word):
        ends = {"bf16_first": int(of_fp8[2] or 0), "bf16_last": int(of_fp8[3] or 0)}
        return {"fp8": Fp8(recipe=cast(Fp8Recipe, of_fp8[1]), **ends)}
    if name in ("cpu", "fp32"):
        return {"device": "cpu"} if name == "cpu" else {"precision": "fp32"}
    raise ValueError(_nothing(word))


def _nothing(word: str) -> str:
    return (
        f"{word!r} is not a layout setting; choose from tp2 pp2 pp2x4 dp8 mb2, ep8 etp1, ulysses4 "
        "ring8 head_chunked8 hybrid4x8 (heads at a time: /16), full kept_attention selective:mlp, "
        "tile-loss tile-mlp, offload-inputs:64 offload-both:64, zero0 zero2 zero3, "
        "adam-on-host:0.5, fp8:tensorwise or fp8:tensorwise:1,1, fp32 cpu"
    )


def _number(word: str, value: str, what: str) -> float:
    try:
        return float(value)
    except ValueError:
        name = word.partition(":")[0]
        raise ValueError(
            f"{word!r} has no {what}; write {name}:64 or {name}:0.5, with a number after the colon"
        ) from None


def _context_parallel(found: re.Match[str]) -> ContextParallel:
    kind, first, second, stage = found.groups()
    if (kind == "hybrid") != (second is not None) or (stage and kind in ("ulysses", "ring")):
        raise ValueError(_nothing(found[0]))
    heads = int(stage) if stage else None
    if kind == "hybrid":
        return ContextParallel.hybrid(ulysses=int(first), ring=int(second), heads_per_stage=heads)
    if kind == "head_chunked":
        return ContextParallel.head_chunked(int(first), heads_per_stage=heads)
    made: ContextParallel = getattr(ContextParallel, kind)(int(first))
    return made


def words_of(layout: Layout) -> str:
    """Return the line that `layout_from` reads; sizes of 1 and defaults are left out."""
    sizes = {word: getattr(layout, name) for word, name in _SIZES.items()}
    sizes["etp"] = 0 if layout.etp in (None, layout.tp) else layout.etp
    chunks = {"pp": f"x{layout.vpp}"} if layout.vpp > 1 else {}
    said = [
        f"{word}{size}{chunks.get(word, '')}"
        for word, size in sizes.items()
        if size > (word != "etp") or word in chunks
    ]
    how, size = layout.cp.how, layout.cp.size
    if size > 1 or how.kind == "head_chunked":
        stage = f"/{how.heads_per_stage}" if how.heads_per_stage else ""
        ranks = f"{how.ulysses}x{size // how.ulysses}" if how.ulysses else f"{size}"
        said.insert(1 if layout.tp > 1 else 0, f"{how.kind}{ranks}{stage}")
    if layout.recompute.kind != "none":
        modules = ",".join(layout.recompute.modules)
        said.append(layout.recompute.kind + (f":{modules}" if modules else ""))
    said += [f"tile-{part}" for part in ("loss", "mlp") if getattr(layout.tiling, part)]
    if layout.offload.tensors != "none":
        said.append(f"offload-{layout.offload.tensors}:{layout.offload.cap_gib:g}")
    said += [word for word, kind in _SHARDING.items() if layout.sharding == kind]
    if layout.optimizer_offload:
        said.append(f"adam-on-host:{layout.optimizer_offload:g}")
    if (fp8 := layout.fp8).recipe != "none":
        ends = f":{fp8.bf16_first},{fp8.bf16_last}" if fp8.bf16_first or fp8.bf16_last else ""
        said.append(f"fp8:{fp8.recipe}{ends}")
    said += ["fp32"] * (layout.precision == "fp32") + ["cpu"] * (layout.device == "cpu")
    return " ".join(said) or ONE_RANK
