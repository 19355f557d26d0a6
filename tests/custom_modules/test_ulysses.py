# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention_kernels import attention
from custom_modules.ulysses import (
    gather_sequence,
    natural_to_zigzag,
    scatter_sequence,
    zigzag_to_natural,
)
from tests.ranks import run_ranks
from tests.reference.attention import attention_with_gradients

# The tokens that Megatron gives to each rank.
SHARDS = {
    "8 tokens, 1 rank": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "8 tokens, 2 ranks": [[0, 1, 6, 7], [2, 3, 4, 5]],
    "8 tokens, 4 ranks": [[0, 7], [1, 6], [2, 5], [3, 4]],
    "12 tokens, 2 ranks": [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]],
    "12 tokens, 3 ranks": [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
}
EACH_SHARD = pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)

HEADS, KV_HEADS, HEAD_DIM, BATCH = 8, 4, 6, 3


@EACH_SHARD
def test_zigzag_shards_become_the_natural_order(shards):
    tokens = sum(len(shard) for shard in shards)
    assert zigzag_to_natural(torch.tensor(shards)).tolist() == list(range(tokens))


@EACH_SHARD
def test_the_natural_order_becomes_zigzag_shards(shards):
    tokens = sum(len(shard) for shard in shards)
    assert natural_to_zigzag(torch.arange(tokens), len(shards)).tolist() == shards


def test_a_length_that_chunks_do_not_divide_is_refused():
    with pytest.raises(RuntimeError, match="unflatten"):
        natural_to_zigzag(torch.arange(10), 2)


def labelled(shard: list[int], heads: int) -> Tensor:
    """Return [s, b, heads, 1] whose entries are 100 * token + 10 * sequence + head."""
    tokens, sequences = torch.tensor(shard)[:, None, None], torch.arange(2)[None, :, None]
    return (100 * tokens + 10 * sequences + torch.arange(heads))[..., None].double()


def exchanged(shards: list[list[int]]) -> tuple[Tensor, Tensor, bool]:
    """Return the labels this rank gathers, and what scattering them leads back to."""
    mine = labelled(shards[dist.get_rank()], HEADS)
    gathered = gather_sequence(mine, dist.group.WORLD)
    return gathered, scatter_sequence(gathered, dist.group.WORLD), mine


def sharded_attention(tokens: list[Tensor], shards: list[list[int]]) -> list[Tensor]:
    """Return this rank's output and gradients, [s, b, heads, D] of its shard."""
    group = dist.group.WORLD
    *inputs, grad_out = (t[shards[dist.get_rank()]] for t in tokens)
    leaves = [t.clone().requires_grad_() for t in inputs]
    q, k, v = (gather_sequence(t, group).permute(1, 2, 0, 3) for t in leaves)
    out = scatter_sequence(attention(q, k, v, causal=True).permute(2, 0, 1, 3), group)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def both(tokens: list[Tensor], shards: list[list[int]]) -> tuple[object, list[Tensor]]:
    """Run both in one set of ranks, since a rank takes seconds to start."""
    return exchanged(shards), sharded_attention(tokens, shards)


@pytest.fixture(scope="module")
def tokens() -> list[Tensor]:
    """q, k, v and the gradient of the output, [S, b, heads, D], for 8 tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, BATCH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.fixture(scope="module", params=["8 tokens, 2 ranks", "8 tokens, 4 ranks"])
def ran(request, tokens):
    """Return the shards and what each rank answers."""
    shards = SHARDS[request.param]
    return shards, run_ranks(both, len(shards), tokens, shards)


def test_a_rank_gathers_every_token_of_its_heads_in_order(ran):
    shards, answers = ran
    whole, share = labelled(list(range(8)), HEADS), HEADS // len(shards)
    for rank, ((gathered, _, _), _) in enumerate(answers):
        assert torch.equal(gathered, whole[:, :, rank * share : (rank + 1) * share])


def test_scattering_undoes_gathering(ran):
    _, answers = ran
    for (_, back, mine), _ in answers:
        assert torch.equal(back, mine)


def test_attention_over_ranks_and_its_gradients_are_those_of_one_rank(ran, tokens):
    shards, answers = ran
    q, k, v, grad_out = (t.permute(1, 2, 0, 3) for t in tokens)
    expected = attention_with_gradients(q, k, v, grad_out, causal=True)
    for shard, (_, ours) in zip(shards, answers, strict=True):
        for tensor, right in zip(ours, expected, strict=True):
            natural = right.permute(2, 0, 1, 3)[shard]
            torch.testing.assert_close(tensor, natural, rtol=0, atol=1e-10)


def heads_that_ranks_do_not_divide() -> None:
    gather_sequence(torch.zeros(4, 1, 3, 2), dist.group.WORLD)


def test_heads_that_ranks_do_not_divide_are_refused():
    with pytest.raises(RuntimeError, match=r"(?s)rank . of 2 failed.*unflatten"):
        run_ranks(heads_that_ranks_do_not_divide, 2)
