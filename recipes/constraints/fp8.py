# SPDX-License-Identifier: Apache-2.0
"""Constraints of FP8: on the device, the dimensions of matrix products, and other settings."""

from collections.abc import Iterator

from custom_modules.memory.config import Tiling
from recipes.constraints.training_step import TrainingStep
from recipes.spec.layout import Fp8, Fp8Recipe

FP8_BLOCK = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Required divisors of the dimensions of an FP8 matrix product: 16 for the product, or the block
size of the recipe if larger (Transformer Engine 2.9's `is_quantizable`)."""


def violations(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint of FP8; `refusal` checks the device."""
    fp8, tiling, tokens = step.fp8, step.tiling, step.tokens // step.tp
    if fp8.recipe == "none":
        return
    if step.on_cpu:
        yield f"fp8 {fp8.recipe} does not compute on cpu; leave fp8 out, or run on GPUs"
        return
    if not step.bf16:
        yield f"fp8 {fp8.recipe} needs precision bf16 for the rest of the model"
    if not step.transformer_engine:
        yield f"fp8 {fp8.recipe} needs Transformer Engine, and this model runs without it"
    per_stage = min(map(len, step.stages)) // step.vpp
    if max(fp8.bf16_first, fp8.bf16_last) > per_stage:
        yield (
            f"fp8 bf16_first {fp8.bf16_first} and bf16_last {fp8.bf16_last}: each is at most the "
            f"{per_stage} layers of a pipeline stage"
        )
    if fp8.recipe == "delayed":
        yield from _delayed(fp8, tiling)
    block = FP8_BLOCK[fp8.recipe]
    sizes = {
        "hidden size": step.hidden,
        "FFN rows of a TP rank": step.ffn_hidden // step.tp,
        "query rows of a TP rank": step.heads * step.head_dim // step.tp,
        "tokens of a rank": tokens,
    }
    if not step.head_chunked:  # it projects q, k and v in bf16
        sizes["QKV rows of a TP rank"] = step.qkv_rows
    tile = max(1, tiling.mlp_tile // step.micro_batch) * step.micro_batch
    if tiling.mlp and tile < tokens:
        sizes["tokens of an MLP tile"] = tile
    for name, size in sizes.items():
        if size % block:
            yield (
                f"fp8 {fp8.recipe} needs multiples of {block}, and the {name} are {size:,}; "
                f"{max(1, size // block) * block:,} would do"
            )


def _delayed(fp8: Fp8, tiling: Tiling) -> Iterator[str]:
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


def refusal(recipe: Fp8Recipe, capability: tuple[int, int], cuda: tuple[int, int]) -> str | None:
    """Return why a device of this compute capability cannot compute a recipe, or None.

    Limits of Transformer Engine 2.9 (`pytorch/quantization.py`); `cuda` is the version torch has.
    """
    device = f"this device has compute capability {capability[0]}.{capability[1]}"
    with_cuda = f"{device} and CUDA {cuda[0]}.{cuda[1]}"
    if recipe == "none":
        return None
    if capability < (8, 9):
        return f"fp8 {recipe} needs 8.9 (Ada) or newer, and {device}; leave fp8 out"
    if recipe == "mxfp8":
        if capability < (10, 0):
            others = "tensorwise or blockwise" if capability >= (9, 0) else "tensorwise"
            return f"fp8 mxfp8 needs 10.0 (Blackwell), and {device}; take {others}"
        if capability >= (12, 0):
            return f"fp8 mxfp8 needs 10.x, and {device}; take tensorwise or blockwise"
    elif recipe == "blockwise":
        if capability < (9, 0) or cuda < (12, 9):
            return (
                f"fp8 blockwise needs 9.0 (Hopper) and CUDA 12.9, and {with_cuda}; take tensorwise"
            )
    elif capability < (9, 0) and cuda < (12, 1):
        return f"fp8 {recipe} needs CUDA 12.1 on Ada, and {with_cuda}; leave fp8 out"
    return None
