# SPDX-License-Identifier: Apache-2.0
"""The tiled loss over tensor ranks and over ranks that share a batch, against one rank."""

import pytest
import torch
import torch.distributed as dist

from custom_modules.tensor_parallel import TensorParallel
from custom_modules.tiling.cross_entropy import tiled_cross_entropy
from tests.custom_modules.support.losses import (
    MASKS,
    UPSTREAMS,
    Case,
    computed,
    expected,
    largest_difference,
    part,
    whole,
)
from tests.ranks import run_ranks, some

CASES = [
    Case(length, batch, tile, masked, upstream)
    for length, batch in ((20, 1), (12, 3))
    for tile in (1, 7, 64)
    for masked in MASKS
    for upstream in UPSTREAMS
] + [
    Case(12, 3, 7, masked, upstream, smoothing, z_loss)
    for masked in ("none", "some")
    for upstream in UPSTREAMS
    for smoothing, z_loss in ((0.1, 0.0), (0.0, 0.01), (0.1, 0.01))
]
# Of 44 tokens on 4 ranks of 12 rows, the last has 8; of 16 rows, the third has 12, the last none.
PADDED = [
    Case(12, 3, 7, masked, upstream, smoothing, z_loss, padding)
    for padding in (4, 20)
    for masked, upstream, smoothing, z_loss in (
        ("none", "one", 0.0, 0.0), ("some", "scalar", 0.0, 0.01), ("some", "each", 0.1, 0.01),
    )
]  # fmt: skip
CASES = some(CASES + PADDED)
SPREAD = pytest.mark.parametrize(
    "sequence_parallel", [False, True], ids=["all tokens", "sequence parallel"]
)


def answers() -> dict[object, dict[str, torch.Tensor]]:
    """Run all in one set of ranks, since a rank takes seconds to start."""
    tp = dist.group.WORLD
    found = {
        (case, spread): computed(case, tp, sequence_parallel=spread)
        for case in CASES
        for spread in (False, True)
    }
    found["alone"] = computed(CASES[0], dist.new_subgroups(1)[0], sequence_parallel=True)
    found["gradient alone"] = weight_gradient_alone()
    return found


def weight_gradient_alone() -> dict[str, torch.Tensor]:
    """Return the gradient of the weight where hidden takes none, for two sums in one graph."""
    case, tp = Case(12, 3, 7, "first half"), dist.group.WORLD
    given, share, shares = whole(case), dist.get_rank(tp), dist.get_world_size(tp)
    weight = given.weight.chunk(shares)[share].clone().requires_grad_()
    losses = tiled_cross_entropy(
        given.hidden.chunk(shares)[share], weight, given.labels, given.mask, tile=7,
        tensor_parallel=TensorParallel(group=tp, sequence_parallel=True),
    )  # fmt: skip
    upstream = torch.full_like(losses, -0.3)
    (first,) = torch.autograd.grad(losses, weight, upstream, retain_graph=True)
    (second,) = torch.autograd.grad(losses, weight, upstream)
    return {"first": first, "second": second}


@pytest.fixture(scope="module")
def on_2_ranks():
    return run_ranks(answers, 2)


@pytest.fixture(scope="module")
def on_4_ranks():
    return run_ranks(answers, 4)


@pytest.mark.parity
@SPREAD
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_ranks_have_one_ranks_losses_and_their_share_of_its_gradients(
    request, size, case, sequence_parallel
):
    for rank, answer in enumerate(request.getfixturevalue(f"on_{size}_ranks")):
        right = part(case, rank, size, sequence_parallel=sequence_parallel)
        assert largest_difference(answer[case, sequence_parallel], right) < 1e-10


@pytest.mark.parity
def test_a_group_of_one_rank_communicates_nothing(on_2_ranks):
    assert largest_difference(on_2_ranks[0]["alone"], part(CASES[0])) < 1e-10


@pytest.mark.parity
def test_hidden_without_gradient_and_a_second_backward_over_sequence_parallel_ranks(on_2_ranks):
    for rank, answer in enumerate(on_2_ranks):
        right = part(Case(12, 3, 7, "first half"), rank, 2)["weight"]
        for grad in answer["gradient alone"].values():
            torch.testing.assert_close(grad, right, rtol=0, atol=1e-10)


UNEVEN = Case(20, 3, 7, "first half", "one")


def average() -> dict[str, torch.Tensor]:
    """Return the mean over a batch and its gradients, where two ranks share each sequence.

    As Megatron does with `calculate_per_token_loss`: each rank's gradient is of the sum of its
    losses; sums of losses, tokens and gradients go over the ranks, then are divided.
    """
    given, rank = whole(UNEVEN), dist.get_rank()
    mine = slice(0, 13) if rank == 0 else slice(13, 20)  # 3 of 10 counted tokens a sequence
    hidden = given.hidden[mine].clone().requires_grad_()
    weight = given.weight.clone().requires_grad_()
    losses = tiled_cross_entropy(
        hidden, weight, given.labels[:, mine], given.mask[:, mine], tile=UNEVEN.tile
    )
    losses.sum().backward()
    total = torch.stack((losses.detach().sum(), given.mask[:, mine].sum().double()))
    for summed in (total, weight.grad):
        dist.all_reduce(summed)
    whole_hidden = torch.zeros_like(given.hidden)
    whole_hidden[mine] = hidden.grad
    dist.all_reduce(whole_hidden)
    return {
        "losses": total[0] / total[1],
        "hidden": whole_hidden / total[1],
        "weight": weight.grad / total[1],
    }


@pytest.mark.parity
def test_ranks_with_few_and_many_counted_tokens_average_to_the_mean_of_one_rank():
    right, tokens = expected(UNEVEN), whole(UNEVEN).mask.sum()
    mean = {name: t / tokens for name, t in right.items()} | {
        "losses": right["losses"].sum() / tokens
    }
    for answer in run_ranks(average, 2):
        assert largest_difference(answer, mean) < 1e-10
