# SPDX-License-Identifier: Apache-2.0
"""Head-chunked attention over 1, 2 and 4 ranks, each possible stage, against the whole block."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.attention.qkv_projection import Projection
from custom_modules.attention.registry import CPU_FLASH
from custom_modules.context_parallel.config import stage_sizes
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.tensor_parallel import TensorParallel
from tests.custom_modules.support.head_chunks import (
    LENGTH,
    Case,
    computed,
    largest_difference,
    parts,
)
from tests.custom_modules.support.zigzag import made_up, shard_of
from tests.ranks import run_ranks, some

DEGREES = {(8, 8): (1, 2, 4), (8, 2): (1, 2, 4), (6, 2): (1, 2), (4, 1): (1, 2, 4)}
MASKS = ({}, {"causal": False}, {"documents": True})
WITHOUT = ({"table": False}, {"bias": False}, {"norms": False}, {"causal": False, "table": False})


def cases(size: int) -> list[Case]:
    """Return every stage size of every degree of `size` ranks, and blocks that lack something."""
    sizes = [
        (*heads, ulysses, stage)
        for heads, degrees in DEGREES.items()
        for ulysses in degrees
        if size % ulysses == 0
        for stage in stage_sizes(*heads, ulysses)
    ]
    plain = [Case(*one, **mask) for one in sizes for mask in MASKS]
    without = [Case(8, 2, u, 4, **lack) for u in (1, 2, 4) if size % u == 0 for lack in WITHOUT]
    return some(plain + without)


SPLIT_CASES = some(
    [
        Case(*heads, ulysses, stage, **other)
        for heads in ((8, 8), (8, 2), (12, 4))
        for ulysses in (1, 2)
        for stage in stage_sizes(heads[0] // 2, heads[1] // 2, ulysses)
        for other in ({}, {"documents": True, "bias": False}, {"norms": False, "table": False})
    ]
)
"""For two tensor ranks, each of which shares its tokens with one context rank."""


def answers(mine: list[Case]) -> dict[object, dict[str, Tensor]]:
    """Run all in one set of ranks, since a rank takes seconds to start."""
    found: dict[object, dict[str, Tensor]] = {
        case: computed(case, cp=dist.group.WORLD) for case in mine
    }
    if dist.get_world_size() == 4:
        (tp, _), (cp, _) = (
            dist.new_subgroups_by_enumeration(groups)
            for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        )
        for case in SPLIT_CASES:
            for spread in (False, True):
                found[case, spread] = computed(case, cp=cp, tp=tp, sequence_parallel=spread)
    return found


@pytest.fixture(scope="module")
def on_1_ranks() -> list[dict[object, dict[str, Tensor]]]:
    return run_ranks(answers, 1, cases(1))


@pytest.fixture(scope="module")
def on_2_ranks() -> list[dict[object, dict[str, Tensor]]]:
    return run_ranks(answers, 2, cases(2))


@pytest.fixture(scope="module")
def on_4_ranks() -> list[dict[object, dict[str, Tensor]]]:
    return run_ranks(answers, 4, cases(4))


@pytest.fixture
def ran(request, size) -> list[dict[object, dict[str, Tensor]]]:
    """Return the answer of each of `size` ranks."""
    return request.getfixturevalue(f"on_{size}_ranks")


@pytest.mark.parity
@pytest.mark.parametrize(
    ("size", "case"),
    [(size, case) for size in (1, 2, 4) for case in cases(size)],
    ids=lambda value: str(value) if isinstance(value, Case) else f"{value} ranks",
)
def test_the_output_and_every_gradient_are_those_of_one_rank(ran, size, case):
    for rank, answer in enumerate(ran):
        right = parts(case, shard_of(LENGTH, rank, size))
        assert largest_difference(answer[case], right) < 1e-10


@pytest.mark.parity
@pytest.mark.parametrize(
    "sequence_parallel", [False, True], ids=["all tokens", "sequence parallel"]
)
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_tensor_ranks_have_their_share_of_one_ranks_gradients(on_4_ranks, case, sequence_parallel):
    for rank, answer in enumerate(on_4_ranks):
        context, share = divmod(rank, 2)
        mine = shard_of(LENGTH, context, 2)
        right = parts(case, mine, share, 2, sequence_parallel=sequence_parallel)
        assert largest_difference(answer[case, sequence_parallel], right) < 1e-10


# heads, KV heads, ranks, heads of a stage: the query heads of each stage.
STAGES = {
    (8, 2, 1, 2): [[0, 4], [1, 5], [2, 6], [3, 7]],
    (8, 2, 2, 4): [[0, 1, 4, 5], [2, 3, 6, 7]],
    (8, 2, 4, 4): [[0, 2, 4, 6], [1, 3, 5, 7]],  # each KV head goes to two ranks
    (8, 8, 2, 2): [[0, 1], [2, 3], [4, 5], [6, 7]],
    (8, 4, 2, 2): [[0, 2], [1, 3], [4, 6], [5, 7]],  # KV heads 0 and 1, then 2 and 3
    (6, 2, 1, 1): [[0], [1], [2], [3], [4], [5]],
    (6, 2, 2, 6): [[0, 1, 2, 3, 4, 5]],
    (4, 1, 4, 4): [[0, 1, 2, 3]],
}


@pytest.mark.parametrize(("sizes", "stages"), STAGES.items(), ids=str)
def test_each_stage_takes_heads_that_share_the_keys_held(sizes, stages):
    heads, kv_heads, ranks, heads_per_stage = sizes
    of = HeadStages(heads=heads, kv_heads=kv_heads, ranks=ranks, heads_per_stage=heads_per_stage)
    taken = [of.query_heads(chunk, stage) for chunk, _ in of.chunks() for stage in of.stages()]
    assert taken == stages


def test_keys_are_held_for_the_stages_that_share_them():
    of = HeadStages(heads=8, kv_heads=4, ranks=2, heads_per_stage=2)
    assert list(of.chunks()) == [(slice(0, 2), slice(0, 2)), (slice(2, 4), slice(2, 4))]
    of = HeadStages(heads=8, kv_heads=2, ranks=4, heads_per_stage=4)
    assert list(of.chunks()) == [(slice(0, 4), slice(0, 2))]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((8, 2, 2, 3), "heads_per_stage 3 is not possible"),
        ((8, 2, 4, 2), "a multiple of 4 that takes whole groups; it may be 4 or 8"),
        ((6, 2, 3, 3), "6 heads and 2 KV heads cannot be spread over 3"),
    ],
)
def test_stages_that_heads_do_not_allow_are_refused(sizes, words):
    heads, kv_heads, ranks, heads_per_stage = sizes
    with pytest.raises(ValueError, match=words):
        HeadStages(heads=heads, kv_heads=kv_heads, ranks=ranks, heads_per_stage=heads_per_stage)


def projection(weight: Tensor) -> Projection:
    return Projection(
        weight=weight, bias=None, heads=6, kv_heads=2, head_dim=2, q_norm=None, k_norm=None
    )


def test_rows_of_a_head_are_found_in_megatrons_order():
    # query 0, 1, 2, key 0, value 0, query 3, 4, 5, key 1, value 1
    of = projection(torch.zeros(20, 3))
    assert of.queries([0, 2, 3, 5]).tolist() == [0, 2, 5, 7]
    assert of.keys(slice(0, 2)).tolist() == [3, 8]
    assert of.keys(slice(1, 2)).tolist() == [8]
    assert of.values(slice(0, 2)).tolist() == [4, 9]


def block(weight: Tensor, documents: Documents | None = None) -> HeadChunked:
    return HeadChunked(
        projection=projection(weight),
        stages=HeadStages(heads=6, kv_heads=2, ranks=1, heads_per_stage=1),
        kernel=CPU_FLASH,
        ulysses=None,
        tensor_parallel=TensorParallel(group=None, sequence_parallel=False),
        table=None,
        causal=True,
        documents=documents,
    )


def test_a_weight_receives_its_gradient_once_in_a_backward_of_six_stages():
    x, weight = made_up((8, 3, 5), (20, 5))
    received = []
    weight.requires_grad_().register_hook(lambda gradient: received.append(gradient.shape))
    weight.register_post_accumulate_grad_hook(lambda parameter: received.append(parameter.shape))
    head_chunked_attention(x, block(weight)).sum().backward()
    assert received == [weight.shape] * 2


def test_an_input_that_is_a_transposed_view_has_the_same_gradient():
    x, weight = made_up((8, 3, 5), (20, 5))
    weight.requires_grad_()
    view = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert view.stride() != x.stride()
    gradients = [
        torch.autograd.grad(
            head_chunked_attention(leaf, block(weight)).square().sum(), (leaf, weight)
        )
        for leaf in (x.requires_grad_(), view.requires_grad_())
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    assert gradients[1][0].abs().max() > 1e-3


def test_mixed_dtypes_are_refused():
    x, weight = made_up((8, 3, 5), (20, 5))
    with pytest.raises(
        ValueError, match=r"input is torch\.float32 and the projection torch\.float"
    ):
        head_chunked_attention(x.float(), block(weight))


@pytest.mark.parametrize("lengths", [[[7]] * 3, [[9]] * 3, [[8]] * 2], ids=str)
def test_a_table_of_other_sequences_is_refused(lengths):
    x, weight = made_up((8, 3, 5), (20, 5))
    with pytest.raises(ValueError, match="the document table covers"):
        head_chunked_attention(x, block(weight, Documents.of(lengths)))
