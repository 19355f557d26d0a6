# SPDX-License-Identifier: Apache-2.0
"""The language-model loss by its formula: every logit in memory, PyTorch's cross-entropy."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def language_model_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return losses [b, s], 0 where masked, for hidden [s, b, h], weight [V, h], labels [b, s]."""
    logits = hidden.transpose(0, 1) @ weight.t()
    if mask is not None:
        labels = torch.where(mask == 0, 0, labels)
    losses = cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=label_smoothing
    )
    losses = losses + z_loss * torch.log(torch.exp(logits).sum(-1)) ** 2
    return losses if mask is None else torch.where(mask == 0, 0.0, losses)


def loss_with_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None, upstream: Tensor,
    **objective: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return losses and the gradients of hidden and weight, all float64."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    losses = language_model_loss(*leaves, labels, mask, **objective)
    return losses.detach(), *torch.autograd.grad(losses, leaves, upstream.double())
