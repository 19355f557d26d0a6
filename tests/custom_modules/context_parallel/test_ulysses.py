# SPDX-License-Identifier: Apache-2.0
"""What is sent where, by labels; attention over it is in test_attend.py."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.context_parallel.p2p import post
from custom_modules.context_parallel.ulysses import (
    gather_sequence,
    gather_shares,
    require_heads,
    scatter_sequence,
    scatter_shares,
    split_heads,
)
from tests.ranks import run_ranks

# The tokens that Megatron gives to each rank.
SHARDS = {
    "8 tokens, 2 ranks": [[0, 1, 6, 7], [2, 3, 4, 5]],
    "12 tokens, 2 ranks": [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]],
    "8 tokens, 4 ranks": [[0, 7], [1, 6], [2, 5], [3, 4]],
}
# The heads of each rank.
SHARES = {
    (8, 2): [[0, 1, 2, 3], [4, 5, 6, 7]],
    (2, 2): [[0], [1]],
    (1, 2): [[0], [0]],
    (8, 4): [[0, 1], [2, 3], [4, 5], [6, 7]],
    (2, 4): [[0], [0], [1], [1]],
    (1, 4): [[0], [0], [0], [0]],
}
CASES = pytest.mark.parametrize(
    ("name", "heads"),
    [(name, heads) for name, shards in SHARDS.items() for heads, size in SHARES
     if size == len(shards)],
)  # fmt: skip


def labelled(tokens: list[int], heads: list[int], sequences: int = 3) -> Tensor:
    """Return [s, b, heads, 1] whose entries are 100 * token + 10 * sequence + head."""
    rows = torch.tensor(tokens)[:, None, None] * 100 + torch.arange(sequences)[:, None] * 10
    return (rows + torch.tensor(heads))[..., None].double()


def exchanged(shards: list[list[int]], heads: int) -> tuple[Tensor, Tensor]:
    """Return the labels this rank gathers, and what scattering them leads back to."""
    mine = labelled(shards[dist.get_rank()], list(range(heads)))
    gathered = gather_sequence(mine, dist.group.WORLD)
    return gathered, scatter_sequence(gathered, dist.group.WORLD, heads=heads)


def in_groups(shards: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Exchange the second half of the heads of each of 4 KV heads, in and out of views."""
    group, size = dist.group.WORLD, dist.get_world_size()
    mine = labelled(shards[dist.get_rank()], list(range(16)))
    views = mine.unflatten(2, (4, 4))[:, :, :, 2:].tensor_split(size, dim=2)
    gathered = gather_shares(views, group)
    out = torch.full_like(mine, -1)
    targets = out.unflatten(2, (4, 4))[:, :, :, 2:].tensor_split(size, dim=2)
    scatter_shares(gathered, targets, group)
    return gathered, out


def refusal_of_an_odd_shard() -> str:
    with pytest.raises(ValueError, match="two chunks") as refused:
        gather_sequence(torch.zeros(3, 1, 4, 2), dist.group.WORLD)
    return str(refused.value)


def numbered_messages() -> list[list[float]]:
    """Send two numbers to the next rank and two to the one before; return what came."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [(after, 1.0), (before, 2.0), (after, 3.0), (before, 4.0)]
    came = [(before, torch.zeros(1)) for _ in range(2)] + [(after, torch.zeros(1)) for _ in "ab"]
    post(
        [(peer, torch.tensor([100 * rank + number])) for peer, number in sent],
        came,
        dist.group.WORLD,
    ).wait()
    return [number.item() for _, number in came]


def answers() -> dict[object, object]:
    """Run all in one set of ranks, since a rank takes seconds to start."""
    size = dist.get_world_size()
    found: dict[object, object] = {
        (name, heads): exchanged(shards, heads)
        for name, shards in SHARDS.items()
        for heads, of in SHARES
        if of == size == len(shards)
    }
    found["groups"] = in_groups(SHARDS[f"8 tokens, {size} ranks"])
    found["odd"] = refusal_of_an_odd_shard()
    found["messages"] = numbered_messages() if size == 4 else None
    return found


@pytest.fixture(scope="module")
def ran() -> dict[int, list[dict[object, object]]]:
    return {size: run_ranks(answers, size) for size in (2, 4)}


@pytest.mark.parity
@CASES
def test_a_rank_gathers_every_token_of_its_heads_in_the_natural_order(ran, name, heads):
    shards = SHARDS[name]
    tokens = list(range(sum(map(len, shards))))
    shares = SHARES[heads, len(shards)]
    for answer, share in zip(ran[len(shards)], shares, strict=True):
        gathered, _ = answer[name, heads]
        assert torch.equal(gathered, labelled(tokens, share))


@pytest.mark.parity
@CASES
def test_scattering_gives_each_rank_the_sum_over_those_that_had_the_head(ran, name, heads):
    shards = SHARDS[name]
    copies = max(1, len(shards) // heads)
    for answer, shard in zip(ran[len(shards)], shards, strict=True):
        _, back = answer[name, heads]
        assert torch.equal(back, copies * labelled(shard, list(range(heads))))


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 4])
def test_shares_may_be_views_of_some_heads_of_each_group(ran, size):
    chosen = [[2, 3], [6, 7], [10, 11], [14, 15]]
    for rank, answer in enumerate(ran[size]):
        gathered, out = answer["groups"]
        share = list(chain(*chosen[rank * 4 // size : (rank + 1) * 4 // size]))
        assert torch.equal(gathered, labelled(list(range(8)), share))
        expected = labelled(SHARDS[f"8 tokens, {size} ranks"][rank], list(range(16)))
        others = [head for head in range(16) if head % 4 < 2]
        expected[:, :, others] = -1
        assert torch.equal(out, expected)


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 4])
def test_an_odd_shard_is_refused(ran, size):
    for answer in ran[size]:
        assert answer["odd"] == "a zigzag shard is two chunks; 3 tokens are not"


@pytest.mark.parity
def test_messages_between_two_ranks_match_in_their_order(ran):
    came = [answer["messages"] for answer in ran[4]]
    assert came[0] == [301, 303, 102, 104]
    assert came[2] == [101, 103, 302, 304]


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (2, 3), (4, 6)])
def test_heads_that_ranks_cannot_share_are_refused(heads, size):
    with pytest.raises(ValueError, match=f"{heads} heads cannot be spread over {size} all-to-all"):
        split_heads(torch.zeros(4, 1, heads, 2), size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "words"),
    [
        (6, 2, 3, "6 heads and 2 KV heads .* over 3 all-to-all ranks; 1, 2, 6 would fit"),
        (8, 8, 16, "1, 2, 4, 8 would fit, and a ring of any size"),
    ],
)
def test_groups_that_ranks_cannot_share_are_refused_with_what_would_fit(
    heads, kv_heads, size, words
):
    with pytest.raises(ValueError, match=words):
        require_heads(heads, kv_heads, size)
