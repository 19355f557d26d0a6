# SPDX-License-Identifier: Apache-2.0
"""The vocabulary under tensor parallelism: rows that TP ranks divide, padding that no loss sees.

    logits = x W^T,  W [P, h],  P >= V        loss = cross_entropy(logits[..., :V], labels)

Each of the TP ranks has P / TP rows of the embedding and of the LM head. If TP divides the
vocabulary of V tokens, P is V. Otherwise P is the next multiple of 128 * TP, as NeMo and Megatron
pad, so that a rank's matrices have sizes that tensor cores compute fast. They leave the logits of
the padding in the softmax, where each takes a share of the probability. Here these logits are the
smallest number of their dtype before anything reads them: their exponential is 0, no maximum is
theirs, and the padding's gradient is exactly 0. Its rows are 0 in a new model and remain 0.

In a checkpoint, Megatron marks both weights with `allow_shape_mismatch`: whatever P it was written
with, the rows that it has are read, and further rows are 0. The same holds for their optimizer
states.

`padded_vocabulary` needs no torch: constraints and the planner call it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

ROWS_OF_RANK = 128
"""Divisor of a rank's rows if the vocabulary is padded: NeMo's `make_vocab_size_divisible_by`."""


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """Return P, the rows of embedding and LM head over all TP ranks."""
    if vocabulary % tp == 0:
        return vocabulary
    unit = ROWS_OF_RANK * tp
    return -(-vocabulary // unit) * unit


def clear_padding(weight: "Tensor", *, vocabulary: int, rank: int) -> None:
    """Set the rows that pad the vocabulary to 0 in the weight [P / TP, h] of a TP rank."""
    weight.data[_tokens(vocabulary, len(weight), rank) :] = 0


def hide_padding(output_layer: "nn.Module", *, vocabulary: int, rank: int) -> None:
    """Make a `ColumnParallelLinear` return the smallest number as logit of each padded row.

    The logits are those of a TP rank, or of all if the layer gathers them. They are overwritten in
    place and without autograd, which takes no memory: a loss that is a function of the softmax has
    a gradient of exactly 0 there.
    """
    import torch

    def hide(_: "nn.Module", inputs: object, output: tuple["Tensor", object]) -> None:
        logits = output[0]
        own = logits.shape[-1] == output_layer.output_size_per_partition
        shown = _tokens(vocabulary, logits.shape[-1], rank if own else 0)
        with torch.no_grad():
            logits[..., shown:] = torch.finfo(logits.dtype).min

    output_layer.register_forward_hook(hide)


def _tokens(vocabulary: int, rows: int, rank: int) -> int:
    """Return how many of the `rows` of a TP rank are tokens; the rest pads."""
    return min(max(vocabulary - rank * rows, 0), rows)
