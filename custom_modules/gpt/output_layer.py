# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core adapter of the tiled loss: an output layer's losses without its logits.

    loss, _ = compute_language_model_loss(labels, output_layer(hidden, weight)[0])

becomes `loss_of(output_layer, hidden, labels, mask, tile=..., weight=weight)`. It reads
weight, TP group and sequence parallelism off the `ColumnParallelLinear`, whose forward never runs.
The weight receives an ordinary gradient, once a backward: Megatron's DDP adds it to `main_grad`,
with `gradient_accumulation_fusion` too, since `grad_added_to_main_grad` is left as it is.
"""

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from custom_modules.gpt.param_gather import finish_gather
from custom_modules.tensor_parallel import TensorParallel
from custom_modules.tiling.cross_entropy import tiled_cross_entropy


def loss_of(
    output_layer: ColumnParallelLinear,
    hidden: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    tile: int,
    vocabulary: int | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return losses [b, S], 0 where masked, of the output layer of a GPT model.

    `hidden` is the layer's input, `weight` the embedding's if it is tied, `vocabulary` the
    number of tokens if further rows pad it; the rest is as in `tiled_cross_entropy`. Raises
    ValueError for features that only the layer's own forward has.
    """
    refuse_output_layer(output_layer)
    finish_gather(output_layer)
    weight = output_layer.weight if weight is None else weight
    if weight is None:
        raise ValueError("the output layer has no weight of its own; give the tied one as weight")
    shape = (output_layer.output_size_per_partition, output_layer.input_size)
    if weight.shape != shape:
        raise ValueError(f"weight is {list(weight.shape)}; the output layer's is {list(shape)}")
    return tiled_cross_entropy(
        hidden,
        weight,
        labels,
        mask,
        tile=tile,
        tensor_parallel=TensorParallel(
            group=output_layer.tp_group, sequence_parallel=output_layer.sequence_parallel
        ),
        vocabulary=vocabulary,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def refuse_output_layer(output_layer: ColumnParallelLinear) -> None:
    """Raise ValueError if the layer has a feature that the tiled loss lacks."""
    if output_layer.config.defer_embedding_wgrad_compute:
        raise ValueError(
            "defer_embedding_wgrad_compute is on: the tiled loss has the LM head's weight gradient "
            "before the backward begins, there is nothing to defer; turn one of them off"
        )
    if output_layer.bias is not None:
        raise ValueError("the output layer has a bias, which the tiled loss does not add")
    if output_layer.disable_grad_reduce:
        raise ValueError(
            "the output layer has disable_grad_reduce, a LoRA adapter's; the tiled loss sums the "
            "gradient of hidden over TP itself"
        )
