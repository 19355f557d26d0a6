# SPDX-License-Identifier: Apache-2.0
"""Ring, Ulysses and their hybrid over 2 and 4 ranks, against the formula on one."""

from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.attention.registry import CPU_FLASH
from custom_modules.context_parallel.attend import Groups, attend, split_group
from tests.custom_modules.support.plain_attention import kernel
from tests.custom_modules.support.zigzag import differences, made_up, shard_of
from tests.ranks import run_ranks, some
from tests.reference.attention import attention_with_gradients

LENGTH, BATCH, HEAD_DIM = 48, 3, 6
DOCUMENTS = {
    "none": None,
    "one": [[48], [48], [48]],
    # Chunks of 12 on two ranks, of 6 on four: documents within, across and as long as chunks.
    "many": [[1, 7, 13, 24, 1, 2], [48], [5, 6, 1, 29, 7]],
    "single tokens": [[1] * 48, [47, 1], [1, 47]],
    "none that ranks share": [[12] * 4, [6] * 8, [3] * 16],
}
# A bf16 input is exact in the reference; each step's output and gradients are rounded to 8 bits.
BF16_TOLERANCE = 2**-6


class Case(NamedTuple):
    """What is attended with, and over how many ranks of all-to-all."""

    heads: int
    kv_heads: int
    ulysses: int
    causal: bool = True
    documents: str = "none"
    dtype: torch.dtype = torch.float64
    strided: bool = False
    """Whether q, k, v and the gradient of the output are views of wider tensors."""


def cases(size: int) -> list[Case]:
    """Return every case of `size` ranks; fewer documents where KV heads have nothing new."""
    degrees = {
        (8, 8): (1, 2, 4),
        (8, 2): (1, 2, 4),  # on 4 ranks a KV head goes to two of them
        (6, 2): (1, 2),
        (4, 1): (1, 2, 4),
    }
    plain = [
        Case(*heads, ulysses, causal, documents)
        for heads, of in degrees.items()
        for ulysses in of
        for causal, documents in product((True, False), DOCUMENTS)
        if size % ulysses == 0
    ]
    other = [
        Case(8, 2, ulysses, documents=documents, **kind)
        for ulysses in (1, 2, 4)
        for documents in ("none", "many")
        for kind in ({"dtype": torch.bfloat16}, {"strided": True})
        if size % ulysses == 0
    ]
    return some(plain + other)


def tokens(case: Case) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, [S, b, heads, D]."""
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return made_up(*((LENGTH, BATCH, n, HEAD_DIM) for n in heads), dtype=case.dtype)


def lengths_of(case: Case) -> list[list[int]] | None:
    return DOCUMENTS[case.documents]


def sharded(case: Case, mine: list[int]) -> list[Tensor]:
    """Return this rank's output and gradients, [s, b, heads, D] of its shard."""
    given = [t[mine] for t in tokens(case)]
    if case.strided:
        given = [torch.cat((t, t), dim=3)[..., : t.shape[3]] for t in given]
    *leaves, grad_out = given
    for leaf in leaves:
        leaf.requires_grad_()
    lengths = lengths_of(case)
    out = attend(
        *leaves,
        kernel=kernel(),
        groups=split_group(dist.group.WORLD, case.ulysses),
        causal=case.causal,
        documents=None if lengths is None else Documents.of(lengths),
    )
    assert out.dtype == case.dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def members(groups: Groups) -> tuple[list[int] | None, list[int] | None]:
    return tuple(
        None if group is None else dist.get_process_group_ranks(group)
        for group in (groups.ulysses, groups.ring)
    )


def refusal(**changed: object) -> str:
    """Return the refusal of two sequences of 4 tokens on each rank, with something changed."""
    given = {"tokens": 4, "heads": (8, 2), "ulysses": 1, "documents": None} | changed
    q, k = (torch.zeros(given["tokens"], 2, heads, 4) for heads in given["heads"])
    with pytest.raises(ValueError, match=r".+") as refused:
        attend(
            q,
            k,
            k,
            kernel=kernel(),
            groups=split_group(dist.group.WORLD, given["ulysses"]),
            causal=True,
            documents=given["documents"],
        )
    return str(refused.value)


def answers(mine: list[Case]) -> dict[object, object]:
    """Run all in one set of ranks, since a rank takes seconds to start."""
    size = dist.get_world_size()
    tokens_of_rank = shard_of(LENGTH, dist.get_rank(), size)
    found: dict[object, object] = {case: sharded(case, tokens_of_rank) for case in mine}
    for ulysses in (1, 2, 4):
        if size % ulysses == 0:
            groups = split_group(dist.group.WORLD, ulysses)
            found["groups", ulysses] = members(groups)
            again = split_group(dist.group.WORLD, ulysses)
            assert groups.ulysses is again.ulysses
            assert groups.ring is again.ring
    short = Documents.of([[7], [7]])
    found["odd"] = refusal(tokens=3)
    found["table, ring"] = refusal(documents=short)
    found["table, all-to-all"] = refusal(documents=short, ulysses=size)
    found["heads"] = refusal(heads=(7, 7), ulysses=size)
    found["degree"] = refusal(ulysses=3)
    return found


@pytest.fixture(scope="module")
def on_2_ranks() -> list[dict[object, object]]:
    return run_ranks(answers, 2, cases(2))


@pytest.fixture(scope="module")
def on_4_ranks() -> list[dict[object, object]]:
    return run_ranks(answers, 4, cases(4))


@pytest.fixture
def ran(request, size) -> list[dict[object, object]]:
    """Return the answer of each of `size` ranks."""
    return request.getfixturevalue(f"on_{size}_ranks")


EACH_SIZE = pytest.mark.parametrize("size", [2, 4], ids="{} ranks".format)


@cache
def expected(case: Case) -> list[Tensor]:
    """Return the whole output and gradients, [S, b, heads, D], by the formula."""
    q, k, v, grad_out = (t.permute(1, 2, 0, 3) for t in tokens(case))
    right = attention_with_gradients(
        q, k, v, grad_out, causal=case.causal, documents=lengths_of(case)
    )
    return [t.permute(2, 0, 1, 3) for t in right]


def named(size: int, case: Case) -> str:
    kind = f"{size} ranks-{case.ulysses}x{size // case.ulysses}"
    form = "causal" if case.causal else "full"
    other = f"-{str(case.dtype)[6:]}" + "-strided" * case.strided
    return f"{kind}-{case.heads}/{case.kv_heads}-{form}-{case.documents}{other}"


ALL = [(size, case) for size in (2, 4) for case in cases(size)]


@pytest.mark.parity
@pytest.mark.parametrize(("size", "case"), ALL, ids=[named(*one) for one in ALL])
def test_the_output_and_its_gradients_are_those_of_one_rank(ran, size, case):
    right = expected(case._replace(ulysses=1, strided=False))
    for rank, answer in enumerate(ran):
        shard = [t[shard_of(LENGTH, rank, size)] for t in right]
        found = differences(answer[case], shard)
        if case.dtype == torch.float64:
            assert max(found.values()) < 1e-10, found
        else:
            largest = dict(zip(found, (t.abs().max().item() for t in right), strict=True))
            assert all(found[name] < BF16_TOLERANCE * largest[name] for name in found), found


@pytest.mark.parity
@pytest.mark.parametrize(
    ("size", "ulysses", "expected"),
    [
        (2, 1, [(None, [0, 1])] * 2),
        (2, 2, [([0, 1], None)] * 2),
        (4, 1, [(None, [0, 1, 2, 3])] * 4),
        (4, 2, [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]),
        (4, 4, [([0, 1, 2, 3], None)] * 4),
    ],
    ids=str,
)
def test_neighbours_exchange_heads_and_their_likes_form_a_ring(ran, ulysses, expected):
    assert [answer["groups", ulysses] for answer in ran] == expected


@pytest.mark.parity
@EACH_SIZE
def test_an_odd_shard_is_refused_by_the_ring(ran):
    for answer in ran:
        assert answer["odd"] == "a zigzag shard is two chunks; 3 tokens are not"


@pytest.mark.parity
@EACH_SIZE
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
def test_a_table_that_does_not_add_up_to_the_sequence_is_refused(ran, size, kind):
    for answer in ran:
        said = answer[f"table, {kind}"]
        assert f"covers 2 sequences of 7 tokens, attention is over 2 of {4 * size}" in said


@pytest.mark.parity
@EACH_SIZE
def test_heads_that_an_all_to_all_cannot_share_are_refused(ran, size):
    for answer in ran:
        assert f"7 heads and 7 KV heads cannot be spread over {size} all" in answer["heads"]
        assert f"ulysses 3 does not divide the {size} ranks" in answer["degree"]


def on_one_rank(*tensors: Tensor, documents: Documents | None = None) -> Tensor:
    return attend(
        *tensors, kernel=CPU_FLASH, groups=Groups(None, None), causal=True, documents=documents
    )


def test_mixed_dtypes_are_refused_by_name():
    q, k, v = made_up(*[(4, 1, 2, 8)] * 3)
    with pytest.raises(ValueError, match=r"q torch\.float64, k torch\.float32, v torch\.float64"):
        on_one_rank(q, k.float(), v)


def test_heads_that_cannot_share_the_kv_heads_are_refused():
    q, k, v = made_up((4, 1, 6, 8), (4, 1, 4, 8), (4, 1, 4, 8))
    with pytest.raises(ValueError, match="6 query heads cannot share 4 KV heads evenly"):
        on_one_rank(q, k, v)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((4, 1, 2, 8), (8, 1, 2, 8), (8, 1, 2, 8)), "may differ only in heads"),
        (((4, 1, 2, 8), (4, 2, 2, 8), (4, 2, 2, 8)), "may differ only in heads"),
        (((4, 1, 2, 8), (4, 1, 2, 8), (4, 1, 1, 8)), "the same for k and v"),
        (((0, 1, 2, 8), (0, 1, 2, 8), (0, 1, 2, 8)), r"q \[0, 1, 2, 8\]"),
        (((4, 1, 2, 8), (4, 1, 0, 8), (4, 1, 0, 8)), r"k \[4, 1, 0, 8\]"),
        (((4, 2, 8), (4, 2, 8), (4, 2, 8)), r"\[s, b, heads, D\] is needed"),
    ],
    ids=["lengths", "batches", "k and v", "no token", "no head", "no batch"],
)
def test_shapes_that_do_not_go_together_are_refused(shapes, words):
    with pytest.raises(ValueError, match=words):
        on_one_rank(*made_up(*shapes))


def test_heads_that_are_strided_give_the_same():
    q, k, v = made_up(*[(4, 1, 2, 8)] * 3)
    strided = torch.stack((q, q), dim=-1)[..., 0]
    assert strided.stride(-1) != 1
    assert torch.equal(on_one_rank(strided, k, v), on_one_rank(q, k, v))


def test_a_table_of_another_batch_is_refused():
    q, k, v = made_up(*[(4, 2, 2, 8)] * 3)
    with pytest.raises(ValueError, match="covers 1 sequences of 4 tokens, attention is over 2"):
        on_one_rank(q, k, v, documents=Documents.of([[4]]))
