# SPDX-License-Identifier: Apache-2.0
"""Constraints between card, stage, layout and machine; each violation is one sentence.

Pure functions of numbers. The recipe builder calls them at build; `recipes.resolved.check` calls
them with the values of a resolved recipe, so the same constraints apply after an override.
"""

from collections.abc import Iterator

from custom_modules.context_parallel.config import (
    TRANSFORMER_ENGINE_KINDS,
    ContextParallelKind,
    degrees,
)
from custom_modules.memory.config import Offload, Recompute, SavedTensors, Tiling
from custom_modules.rope.config import MAX_POSITION, RopeScaling
from recipes.spec.layout import Fp8, Fp8Recipe, Sharding
from recipes.spec.units import GiB

FP8_BLOCK = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Required divisors of the dimensions of an FP8 matrix product: 16 for the product, or the block
size of the recipe if larger (Transformer Engine 2.9's `is_quantizable`)."""


def broken(
    *,
    seq_length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    vocab: int,
    tp: int,
    cp: int,
    cp_kind: ContextParallelKind,
    pp: int,
    world_size: int,
    ranks_per_node: int,
    global_batch: int,
    micro_batch: int,
) -> Iterator[str]:
    """Yield one sentence for each constraint that these numbers violate.

    `global_batch` and `micro_batch` are in sequences; `world_size` is nodes times ranks per node.
    `heads` and `kv_heads` are the model's.
    """
    sizes = {
        "sequence length": seq_length, "heads": heads, "KV heads": kv_heads, "layers": layers,
        "head size": head_dim, "vocabulary": vocab, "TP": tp, "CP": cp, "PP": pp,
        "world size": world_size, "ranks per node": ranks_per_node,
        "global batch": global_batch, "micro-batch": micro_batch,
    }  # fmt: skip
    too_small = [
        f"{name} is {size}; it must be at least 1" for name, size in sizes.items() if size < 1
    ]
    if too_small:
        yield from too_small
        return
    model_ranks = tp * cp * pp
    if world_size % model_ranks:
        yield (
            f"world size {world_size} does not match the layout: TP {tp} x CP {cp} x PP {pp} = "
            f"{model_ranks} ranks, so it must be a multiple of {model_ranks}"
        )
        return
    dp = world_size // model_ranks
    if seq_length > MAX_POSITION:
        yield f"sequence length {seq_length:,} has positions from 2^31 on, which are not rotated"
    if cp > 1 and seq_length % (2 * cp):
        yield (
            f"sequence length {seq_length:,} is not divisible by 2 x CP = {2 * cp}, "
            f"which zigzag sharding needs; {seq_length // (2 * cp) * 2 * cp:,} would do"
        )
    elif tp > 1 and (seq_length // cp) % tp:
        yield (
            f"sequence length {seq_length:,} over CP {cp} is not divisible by TP {tp}, which "
            f"sequence parallelism needs; {seq_length // (2 * cp * tp) * 2 * cp * tp:,} would do"
        )
    if heads % tp or kv_heads % tp:
        yield (
            f"{heads} heads and {kv_heads} KV heads are not both divisible by TP {tp}; "
            f"TP may be {_divisors(heads, kv_heads)}"
        )
    else:
        try:
            degrees(
                cp_kind,
                size=cp,
                heads=heads // tp,
                kv_heads=kv_heads // tp,
                head_dim=head_dim,
                seq_length=seq_length,
                ranks_per_link=max(1, ranks_per_node // tp),
            )
        except ValueError as error:
            yield str(error)
    if head_dim % 2:
        yield f"the head size is {head_dim}; rotation pairs dimensions, so it must be even"
    if vocab % tp:
        yield f"a vocabulary of {vocab:,} rows is not divisible by TP {tp}"
    if layers % pp:
        yield f"{layers} layers are not divisible by PP {pp}; PP may be {_divisors(layers)}"
    if global_batch % (micro_batch * dp):
        yield (
            f"a batch of {global_batch} sequences of {seq_length:,} tokens is not divisible by "
            f"micro-batch {micro_batch} x DP {dp}; use fewer DP ranks, or a multiple of "
            f"{micro_batch * dp * seq_length:,} tokens per batch"
        )


def broken_schedule(*, max_steps: int, lr: float) -> Iterator[str]:
    """Yield one sentence for each violated constraint of the schedule."""
    if max_steps < 1:
        yield f"max_steps is {max_steps}; a stage has at least one step"
    if not 0 < lr < 1:
        yield f"the learning rate is {lr:g}; it must lie between 0 and 1"


def broken_memory(
    *,
    recompute: Recompute,
    tiling: Tiling,
    offload: Offload,
    cp_kind: str,
    head_chunked: bool,
    saved: SavedTensors,
    layers: int,
    pp: int,
    micro_batches: int,
) -> Iterator[str]:
    """Yield one sentence for each violated constraint of recompute, tiling and offload.

    `saved` are sizes on one rank; `micro_batches` is the number in a step on one DP rank.
    """
    per_stage = layers // pp
    if recompute.layers > per_stage:
        yield (
            f"recompute layers is {recompute.layers}, and a pipeline stage has {per_stage}; "
            f"take at most {per_stage}"
        )
    kept = "kept_attention" in (recompute.kind, recompute.others)
    if kept and cp_kind in TRANSFORMER_ENGINE_KINDS:
        yield (
            f"recompute is kept_attention and the context parallel kind {cp_kind}, whose output "
            "only Transformer Engine can keep; take ring, ulysses, head_chunked or hybrid, or "
            "recompute full"
        )
    if "core_attn" in recompute.modules and head_chunked:
        yield (
            "recompute modules include core_attn, but head-chunked attention keeps no queries, "
            "keys and values to recompute from; leave it out, or take ulysses, ring or hybrid"
        )
    if "mlp" in recompute.modules and tiling.mlp:
        yield (
            "recompute modules include mlp, and tiling mlp also recomputes the MLP, one tile at a "
            "time; leave one of them out"
        )
    if (why := offload.refusal(recompute)) is not None:
        yield why
        return
    in_flight = min(pp, micro_batches)
    stages = [range(first, first + per_stage) for first in range(1, layers + 1, per_stage)]
    needed = max(
        saved.on_host(offload, recompute, layers=stage, in_flight=in_flight) for stage in stages
    )
    if needed > offload.cap_gib * GiB:
        yield (
            f"offload {offload.tensors} needs {needed / GiB:.3g} GiB of host memory on a rank "
            f"({per_stage} layers, {in_flight} micro-batches in flight) and cap_gib is "
            f"{offload.cap_gib:g}; raise it, or offload fewer tensors, or not every layer"
        )


def clamped_tiles(tiling: Tiling, *, tokens: int, tp: int) -> Iterator[str]:
    """Yield one sentence for each tile that is larger than the tokens it divides.

    `tokens` are those of a rank, before sequence parallelism divides them by TP.
    """
    for part, there in (("loss", tokens), ("mlp", tokens // tp)):
        tile = getattr(tiling, f"{part}_tile")
        if getattr(tiling, part) and tile > there:
            yield (
                f"tiling {part}_tile is {tile:,} tokens and a rank has {there:,}; they are one "
                "tile, and tiling saves nothing"
            )


def broken_rope(rope: RopeScaling, *, documents: str) -> Iterator[str]:
    """Yield one sentence if the rotation depends on length and documents differ in length."""
    alike = rope.method == "longrope" and rope.short_factor == rope.long_factor
    if documents == "within" and rope.by_length and not alike:
        yield (
            f"documents is within, but rope {rope.method} depends on the sequence length: a short "
            "document would be rotated differently in a long sequence than alone; take documents "
            "across, or ntk or yarn"
        )


def unstretched(rope: RopeScaling, *, length: int) -> Iterator[str]:
    """Yield one sentence if a rotation does not match the context that it is used at."""
    if rope.original_length is None or rope.reach is None:
        return
    if rope.original_length > length:
        yield (
            f"rope original_length is {rope.original_length:,} and the context {length:,} tokens; "
            f"{rope.method} lowers frequencies for a context that is not reached"
        )
    elif rope.reach < length:
        yield (
            f"rope {rope.method} reaches {rope.reach:,} tokens, factor {rope.factor:g} times "
            f"original_length {rope.original_length:,}, and the context is {length:,}"
        )


def broken_sharding(
    sharding: Sharding,
    *,
    pp: int,
    optimizer_offload: float,
    precision_aware: bool,
    tiling: Tiling,
    head_chunked: bool,
) -> Iterator[str]:
    """Yield one sentence for each violated constraint of sharding and optimizer offload."""
    fsdp = sharding in ("gradients", "parameters")
    if fsdp and tiling.loss:
        yield (
            f"sharding {sharding} with tiling loss, which reads the LM head's weight without "
            "calling the module that Megatron FSDP gathers it for; take sharding optimizer"
        )
    if sharding == "gradients" and tiling.mlp:
        yield (
            "sharding gradients with tiling mlp: Megatron FSDP would reduce the MLP's gradients "
            "after its first tile; take sharding optimizer or parameters"
        )
    if sharding == "gradients" and head_chunked:
        yield (
            "sharding gradients with head-chunked attention, which reads the QKV projection's "
            "weight without calling it; take sharding optimizer or parameters, or ulysses"
        )
    if fsdp and pp > 1:
        yield (
            f"sharding {sharding} uses Megatron FSDP, which lays ranks out as DP x TP, but PP is "
            f"{pp}; take PP 1, or sharding optimizer"
        )
    if not 0 <= optimizer_offload <= 1:
        yield f"optimizer_offload is {optimizer_offload:g}; it is a fraction, 0 to 1"
    elif optimizer_offload and sharding != "optimizer":
        yield (
            f"optimizer_offload is {optimizer_offload:g} with sharding {sharding}; Megatron-Core "
            "offloads only shards of its distributed optimizer: take sharding optimizer"
        )
    elif optimizer_offload and not precision_aware:
        yield (
            f"optimizer_offload is {optimizer_offload:g} without use_precision_aware_optimizer, "
            "which it needs to receive gradients; set that too"
        )


def broken_fp8(
    fp8: Fp8,
    *,
    on_cpu: bool,
    bf16: bool,
    transformer_engine: bool,
    head_chunked: bool,
    tiling: Tiling,
    hidden: int,
    ffn: int,
    qkv: int,
    tokens: int,
    micro_batch: int,
    layers: int,
    pp: int,
) -> Iterator[str]:
    """Yield one sentence for each violated constraint of FP8; `fp8_refusal` checks the device.

    `ffn` and `qkv` are rows per TP rank, `tokens` are those of a rank outside of attention.
    """
    if fp8.recipe == "none":
        return
    if on_cpu:
        yield f"fp8 {fp8.recipe} does not compute on cpu; leave fp8 out, or run on GPUs"
        return
    if not bf16:
        yield f"fp8 {fp8.recipe} needs precision bf16 for the rest of the model"
    if not transformer_engine:
        yield f"fp8 {fp8.recipe} needs Transformer Engine, and this model runs without it"
    if head_chunked:
        yield (
            f"fp8 is {fp8.recipe}, but head-chunked attention projects in the model's dtype; take "
            "ulysses, ring or hybrid"
        )
    per_stage = layers // pp
    if max(fp8.bf16_first, fp8.bf16_last) > per_stage:
        yield (
            f"fp8 bf16_first {fp8.bf16_first} and bf16_last {fp8.bf16_last}: each is at most the "
            f"{per_stage} layers of a pipeline stage"
        )
    if fp8.recipe == "delayed":
        yield from _broken_delayed(fp8, tiling)
    block = FP8_BLOCK[fp8.recipe]
    sizes = {
        "hidden size": hidden,
        "FFN rows of a TP rank": ffn,
        "QKV rows of a TP rank": qkv,
        "tokens of a rank": tokens,
    }
    tile = max(1, tiling.mlp_tile // micro_batch) * micro_batch
    if tiling.mlp and tile < tokens:
        sizes["tokens of an MLP tile"] = tile
    for name, size in sizes.items():
        if size % block:
            yield (
                f"fp8 {fp8.recipe} needs multiples of {block}, and the {name} are {size:,}; "
                f"{max(1, size // block) * block:,} would do"
            )


def _broken_delayed(fp8: Fp8, tiling: Tiling) -> Iterator[str]:
    """Yield one sentence for each violated constraint of delayed scaling."""
    if fp8.bf16_first or fp8.bf16_last:
        yield (
            f"fp8 delayed with bf16_first {fp8.bf16_first} and bf16_last {fp8.bf16_last}: its "
            "scales are reduced over one context for all layers; take tensorwise, blockwise or "
            "mxfp8"
        )
    if tiling.mlp:
        yield (
            "fp8 delayed with tiling mlp: Transformer Engine expects one call of a module per "
            "step, and each tile would overwrite the largest value of the one before; take "
            "tensorwise, blockwise or mxfp8"
        )


def fp8_refusal(
    recipe: Fp8Recipe, capability: tuple[int, int], cuda: tuple[int, int]
) -> str | None:
    """Return why a device of this compute capability cannot compute a recipe, or None.

    Limits of Transformer Engine 2.9 (`pytorch/quantization.py`); `cuda` is the version torch has.
    """
    device = f"this device has compute capability {capability[0]}.{capability[1]}"
    with_cuda = f"{device} and CUDA {cuda[0]}.{cuda[1]}"
    if recipe == "none":
        return None
    if recipe == "mxfp8":
        if capability < (10, 0):
            return f"fp8 mxfp8 needs 10.0 (Blackwell), and {device}; take tensorwise or blockwise"
        if capability >= (12, 0):
            return f"fp8 mxfp8 needs 10.x, and {device}; take tensorwise or blockwise"
    elif recipe == "blockwise":
        if capability < (9, 0) or cuda < (12, 9):
            return (
                f"fp8 blockwise needs 9.0 (Hopper) and CUDA 12.9, and {with_cuda}; take tensorwise"
            )
    elif capability < (8, 9):
        return f"fp8 {recipe} needs 8.9 (Ada), and {device}; leave fp8 out"
    elif capability < (9, 0) and cuda < (12, 1):
        return f"fp8 {recipe} needs CUDA 12.1 on Ada, and {with_cuda}; leave fp8 out"
    return None


def _divisors(*numbers: int) -> str:
    """Return the common divisors of the numbers as text for a message."""
    common = [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]
    return ", ".join(map(str, common[:-1])) + f" or {common[-1]}" if common[1:] else "1 only"
