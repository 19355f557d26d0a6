# SPDX-License-Identifier: Apache-2.0
"""The LM head and cross-entropy over tiles of the sequence: the full logits are never formed.

    loss = cross_entropy(x W^T, labels, reduction="none")

has N * V logits, and its gradient holds them three times (logits, their log-softmax, its gradient):
with V = 128,256 that is 513 KB a token in fp32 for each, hundreds of times x. Here a tile of T
tokens passes through all steps at once:

1. logits = x W^T of the tile, in a buffer that every tile reuses;
2. its log-sum-exp and label logits give the losses;
3. the buffer becomes dlogits = softmax - onehot, the gradient of each token's own loss
   (`custom_modules.tiling.softmax_tile`), and from it, still in the forward,
4. dx = dlogits W of the tile, and dW += dlogits^T x, in fp32 (float64 for float64).

So x W^T is computed once, as by the plain formula. The backward knows the upstream gradient g of
each token's loss. dx is linear in it row by row, so its rows are scaled, which is exact for any g.
dW is not: it needs g to be one number for all counted tokens, which it is when training on a sum or
mean of losses. Then dW is scaled; for any other g the tiles are computed once more with the true g
(one more x W^T). Both are scaled in place, so a second backward through the same graph computes the
tiles again too.

Masked tokens cost nothing: the rows of counted tokens are selected, tile by tile, before any
product. With none at all, losses and gradients are zero.

Label smoothing e and z-loss c, V the whole vocabulary, per token:

    loss = lse - (1 - e) logits[label] - e / V * sum(logits) + c * lse^2

Vocabulary parallelism: W is this TP rank's v = V/P rows. The ranks merge by log-sum-exp, one
all-gather of 2 (3 with smoothing) fp32 numbers a token and rank. x is the same on every rank, and
its gradient is all-reduced once, in the backward; or, with sequence parallelism, each rank holds
a contiguous 1/P of the sequence: T/P counted tokens of each are gathered for a tile, padded to the
rank with the most, and dx is reduce-scattered. Every rank knows the whole mask, so all take part in
the same collectives, however many tokens they have. Losses are the same on every TP rank, and their
upstream gradient must be.

Padding: if V is not the sum of the ranks' v, the last rows of W pad it. Their columns of the tile
are not among those of steps 2 and 3, and are 0 in step 4: the loss is that without them, their rows
of dW are 0, and all matrices keep the sizes that they were padded to.

Memory on top of what is returned (losses, dx, dW): T * v logits, 2 T * h of x and dx (with
sequence parallelism twice that); dW in fp32 and, for other dtypes, its cast. dx and dW live from
the forward to the backward. The plain formula has 3 N * v.

Legend: s tokens of a sequence on this rank, S over the ranks of sequence parallelism (s without
it), b sequences, N = S * b tokens, h hidden, V vocabulary, v rows of W here, P ranks, T the tile.

Composes with CP and DP (losses are per token; an average divides sums by counted tokens), PP and
recompute of layers. Limits: no bias; fp16's smallest dlogits are lost, since a loss scale comes
later; once differentiable. On a GPU the forward waits for the device to count tokens, and the
backward to compare g. Source: the order of work is that of
Liger-Kernel's fused linear cross-entropy (arXiv 2410.10989), per token and over TP.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from custom_modules.dtypes import accumulation_dtype
from custom_modules.profiling.categories import category
from custom_modules.tensor_parallel import TensorParallel
from custom_modules.tiling.softmax_tile import (
    Objective,
    SoftmaxPasses,
    accumulate,
    passes_for,
)

ONE_RANK = TensorParallel(group=None, sequence_parallel=False)


class TokenTile(NamedTuple):
    """The counted tokens of one tile."""

    rows: Tensor
    """Row indices in this rank's x [s * b, h]."""
    tokens: Tensor
    """Indices in all S * b tokens, grouped by rank, in rank order."""
    counts: list[int]
    """How many of them each rank of sequence parallelism holds."""


def split_into_tiles(counted: Tensor, tile: int, shards: int, rank: int) -> list[TokenTile]:
    """Distribute the tokens that `counted` [N] marks over tiles.

    Tokens are in `shards` contiguous shards, and a tile takes equally many from each while they
    last. It has `tile` tokens, rounded up to a multiple of the shards.
    """
    each, of_shard = -(-tile // shards), len(counted) // shards
    counts: list[int] = counted.view(shards, of_shard).sum(1).tolist()
    held = counted.nonzero()[:, 0].split(counts)
    found = []
    for start in range(0, max(counts), each):
        parts = [tokens[start : start + each] for tokens in held]
        sizes = [len(part) for part in parts]
        found.append(TokenTile(parts[rank] - rank * of_shard, torch.cat(parts), sizes))
    return found


class TileSums(NamedTuple):
    """Results of one pass over the tiles."""

    losses: Tensor
    """[N], 0 where a token is not counted."""
    dx: Tensor | None
    """[s * b, h], in the dtype of x; without sequence parallelism this TP rank's share of a sum."""
    dweight: Tensor | None
    """[v, h], fp32 (float64 for float64)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledLoss:
    """The pass of one rank over the tiles."""

    objective: Objective
    tensor_parallel: TensorParallel
    tile: int

    @property
    def shards(self) -> int:
        """Number of ranks that the sequence is sharded over."""
        spread = self.tensor_parallel.sequence_parallel
        return dist.get_world_size(self.tensor_parallel.group) if spread else 1

    @property
    def shard(self) -> int:
        """Index of this rank's part of the sequence."""
        spread = self.tensor_parallel.sequence_parallel
        return dist.get_rank(self.tensor_parallel.group) if spread else 0

    def sweep(
        self, x: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, *,
        upstream: Tensor | None, wanted: tuple[bool, bool],
    ) -> TileSums:  # fmt: skip
        """Return losses, and the gradients of x and weight if requested.

        x is [s, b, h]; labels, `counted` and `upstream` are [N], tokens ordered as in x. The
        gradients are those of the sum of `upstream` (None: 1) times the losses.
        """
        flat, dtype = x.flatten(0, 1), accumulation_dtype(x.dtype)
        passes, first, tokens = passes_for(x.device), *self._share(weight)
        losses = x.new_zeros(labels.shape, dtype=dtype)
        dx = torch.zeros_like(flat) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        buffer = None
        for of in split_into_tiles(counted, self.tile, self.shards, self.shard):
            tile = self._gathered(flat[of.rows], of.counts)
            if buffer is None:  # the first tile is the largest
                buffer = x.new_empty(len(tile), len(weight))
            logits = torch.mm(tile, weight.t(), out=buffer[: len(tile)])
            padding, logits_of_tokens = logits[:, tokens:], logits[:, :tokens]
            mine = labels[of.tokens] - first
            own = self._reduced(passes, logits_of_tokens, mine)
            merged, found = self._merged(own)
            lse = own[0] if merged is None else merged
            losses[of.tokens] = self.objective.losses(lse, found)
            if dx is None and dweight is None:
                continue
            slope = self.objective.logit_gradient(
                lse, None if upstream is None else upstream[of.tokens]
            )
            if tokens:
                passes.gradient(logits_of_tokens, mine, own, merged, slope)
            if tokens < len(weight):
                padding.zero_()
            if dx is not None:
                dx[of.rows] = self._returned(logits @ weight, of.counts)
            if dweight is not None:
                accumulate(dweight, logits, tile)
        return TileSums(losses, dx, dweight)

    def uniform_upstream(self, upstream: Tensor, counted: Tensor) -> Tensor | None:
        """Return the common value of `upstream` [N] for all counted tokens, or None.

        TP ranks decide together: a rank that computed the tiles again alone would wait for the
        others.
        """
        ours = upstream[counted]
        one = ours[:1].sum()  # 0 where no token is counted
        same = (ours == one).all()
        if self.tensor_parallel.group is not None:
            votes = same.to(torch.int32)
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.tensor_parallel.group)
            same = votes
        return one if same.item() else None

    def _share(self, weight: Tensor) -> tuple[int, int]:
        """Return the first token of this rank's rows, and how many of the rows are tokens."""
        group = self.tensor_parallel.group
        first = 0 if group is None else dist.get_rank(group) * len(weight)
        return first, min(max(self.objective.vocabulary - first, 0), len(weight))

    def _reduced(self, passes: SoftmaxPasses, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the results of `reduce`; of a rank whose rows are all padding, those of no row."""
        with_sum = self.objective.label_smoothing > 0
        if logits.shape[1]:
            return passes.reduce(logits, labels, with_sum)
        dtype = accumulation_dtype(logits.dtype)
        none = logits.new_zeros(2 + with_sum, len(logits), dtype=dtype)
        none[0] = -torch.inf
        return none

    def _merged(self, own: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the log-sum-exp and the sums over TP ranks of the results of `reduce`."""
        group = self.tensor_parallel.group
        if group is None:
            return None, own
        whole = own.new_empty(dist.get_world_size(group), *own.shape)
        dist.all_gather_into_tensor(whole.flatten(0, 1), own, group=group)
        return whole[:, 0].logsumexp(0), whole.sum(0)

    def _gathered(self, x: Tensor, counts: list[int]) -> Tensor:
        """Return the tile's x of all ranks of sequence parallelism, from this rank's."""
        if self.shards == 1:
            return x
        most = max(counts)
        with category("communication"):
            whole = x.new_empty(len(counts) * most, x.shape[1])
        padded = nn.functional.pad(x, (0, 0, 0, most - len(x)))
        dist.all_gather_into_tensor(whole, padded, group=self.tensor_parallel.group)
        if len(whole) == sum(counts):
            return whole
        return torch.cat(
            [part[:count] for part, count in zip(whole.split(most), counts, strict=True)]
        )

    def _returned(self, dx: Tensor, counts: list[int]) -> Tensor:
        """Return the sum over ranks of dx, for this rank's tokens of the tile."""
        if self.shards == 1:
            return dx
        most = max(counts)
        if len(dx) < most * len(counts):
            parts = dx.split(counts)
            dx = torch.cat([nn.functional.pad(t, (0, 0, 0, most - len(t))) for t in parts])
        with category("communication"):
            mine = dx.new_empty(most, dx.shape[1])
        dist.reduce_scatter_tensor(mine, dx, group=self.tensor_parallel.group)
        return mine[: counts[self.shard]]


class _TiledCrossEntropy(torch.autograd.Function):
    """Keeps dx [s, b, h] in its dtype and dW [v, h] in fp32, of the sum of the losses.

    Saves x, the weight, labels and mask, which are its arguments, for gradients of another sum.
    The weight receives one gradient a backward, in its own dtype.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, how: TiledLoss,
        wanted: tuple[bool, bool],
    ) -> Tensor:  # fmt: skip
        with category("loss"):
            swept = how.sweep(x, weight, labels, counted, upstream=None, wanted=wanted)
        ctx.how, ctx.wanted = how, wanted
        ctx.kept = swept.dx, swept.dweight
        ctx.save_for_backward(x, weight, labels, counted)
        return swept.losses

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        how: TiledLoss = ctx.how
        x, weight, labels, counted = ctx.saved_tensors
        upstream = upstream.where(counted, 0)  # the upstream gradient of a masked token may be NaN
        of_x, of_weight = ctx.wanted
        (dx, dweight), ctx.kept = ctx.kept or (None, None), None
        with category("loss"):
            if dx is not None:
                dx.mul_(upstream.view(how.shards, -1)[how.shard, :, None])
            if dweight is not None:
                one = how.uniform_upstream(upstream, counted)
                dweight = None if one is None else dweight.mul_(one)
            again = (of_x and dx is None, of_weight and dweight is None)
            if any(again):
                swept = how.sweep(x, weight, labels, counted, upstream=upstream, wanted=again)
                dx = swept.dx if dx is None else dx
                dweight = swept.dweight if dweight is None else dweight
            if dx is not None:
                tensor_parallel = how.tensor_parallel
                if tensor_parallel.group is not None and not tensor_parallel.sequence_parallel:
                    dist.all_reduce(dx, group=tensor_parallel.group)
                dx = dx.view(x.shape)
            if dweight is not None:
                dweight = dweight.to(weight.dtype)
        return dx, dweight, None, None, None, None


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    tile: int,
    tensor_parallel: TensorParallel = ONE_RANK,
    vocabulary: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the loss of each token [b, S], fp32 (float64 for float64), 0 if it is masked.

    Args:
        hidden: [s, b, h]; with sequence parallelism this TP rank's contiguous part of S tokens.
        weight: [v, h], this TP rank's rows of the LM head.
        labels: [b, S], of the whole vocabulary; those of masked tokens are not read.
        mask: [b, S], 0 for tokens that are not counted; None: all are. Labels and mask are whole
            on every TP rank.
        tile: tokens whose logits are held at a time; a larger tile than the sequence is the
            whole sequence.
        vocabulary: V if the last rows of the whole LM head pad it; None: all rows are tokens.

    A label outside the vocabulary raises ValueError on a CPU; on a GPU, where a check would have to
    wait, it adds nothing to the log-sum-exp.
    """
    tensor_parallel = _needed(tensor_parallel)
    rows = len(weight) * _size(tensor_parallel.group)
    how = TiledLoss(
        objective=Objective(
            vocabulary=rows if vocabulary is None else vocabulary,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        ),
        tensor_parallel=tensor_parallel,
        tile=tile,
    )
    _require(hidden, weight, labels, mask, how)
    ordered = labels.t().flatten()
    counted = torch.ones_like(ordered, dtype=torch.bool)
    if mask is not None:
        counted = (mask.t() != 0).flatten()
    if labels.device.type == "cpu":
        _require_labels(ordered[counted], how.objective.vocabulary)
    grad = torch.is_grad_enabled()
    wanted = (grad and hidden.requires_grad, grad and weight.requires_grad)
    losses: Tensor = _TiledCrossEntropy.apply(hidden, weight, ordered, counted, how, wanted)
    return losses.view(labels.shape[::-1]).t().contiguous()


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _needed(given: TensorParallel) -> TensorParallel:
    """Return the tensor parallelism to communicate over: none over one rank."""
    return ONE_RANK if _size(given.group) == 1 else given


def _require(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None, how: TiledLoss
) -> None:
    if how.tile < 1:
        raise ValueError(f"tile is {how.tile} tokens; it must be at least 1")
    if not 0 <= how.objective.label_smoothing <= 1:
        raise ValueError(
            f"label_smoothing is {how.objective.label_smoothing}; it is a share, from 0 to 1"
        )
    if how.objective.z_loss < 0:
        raise ValueError(f"z_loss is {how.objective.z_loss}; it must be at least 0")
    rows = len(weight) * _size(how.tensor_parallel.group)
    if not 0 < how.objective.vocabulary <= rows:
        raise ValueError(
            f"vocabulary is {how.objective.vocabulary:,} and the LM head has {rows:,} rows over "
            f"all ranks; it must be 1 to {rows:,}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and the LM head {weight.dtype}; cast them to one"
        )
    if hidden.ndim != 3 or weight.ndim != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and the LM head {list(weight.shape)}; [s, b, h] and "
            "[v, h] are needed"
        )
    whole = (hidden.shape[1], hidden.shape[0] * how.shards)
    for name, given in {"labels": labels, "mask": mask}.items():
        if given is not None and given.shape != whole:
            raise ValueError(
                f"{name} are {list(given.shape)} for hidden {list(hidden.shape)} on each of "
                f"{how.shards} ranks of the sequence; {list(whole)} is needed"
            )


def _require_labels(labels: Tensor, vocabulary: int) -> None:
    wrong = labels[(labels < 0) | (labels >= vocabulary)]
    if len(wrong):
        raise ValueError(
            f"label {int(wrong[0])} is outside the vocabulary of {vocabulary:,}; mask tokens that "
            "are not counted"
        )
