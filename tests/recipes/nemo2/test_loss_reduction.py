# SPDX-License-Identifier: Apache-2.0
"""The mean of a step's micro-batches, and that the host does not wait for the device for it."""

import statistics

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.nemo2.model import TokenWeightedLoss

# Sum of losses and valid tokens of each micro-batch; the third has no valid token.
MICRO_BATCHES = [(8.0, 4.0), (9.0, 3.0), (0.0, 0.0), (10.0, 10.0)]


class NoWait(TorchDispatchMode):
    """Refuses operators whose result the host has to wait for: values, and shapes by a mask."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero"), name
        if name.startswith("aten::index"):
            indices = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor)]
            assert all(index.dtype != torch.bool for index in indices), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("megatron_rank")
def test_a_step_is_reduced_without_waiting_for_the_device():
    losses = [{"loss_sum_and_ub_size": torch.tensor(pair)} for pair in MICRO_BATCHES]
    reduction = TokenWeightedLoss()
    with NoWait():
        loss = reduction.reduce(losses)
    assert loss.item() == pytest.approx(27 / 17)
    assert reduction.spread.item() == pytest.approx(statistics.pstdev([2.0, 3.0, 1.0]))
