# SPDX-License-Identifier: Apache-2.0
"""One attention block cut by heads over context and tensor ranks, and whole by the formula."""

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from custom_modules.attention.documents import Documents
from custom_modules.attention.qkv_projection import Projection
from custom_modules.context_parallel.attend import split_group
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.tensor_parallel import TensorParallel
from tests.custom_modules.support.plain_attention import kernel
from tests.custom_modules.support.zigzag import here, made_up, shard_of
from tests.reference.attention_block import attention_block
from tests.reference.norm import rms_norm
from tests.reference.rope import rope_table

LENGTH, BATCH, HEAD_DIM, HIDDEN, EPS = 48, 3, 4, 10, 1e-5
MANY = [[1, 7, 13, 24, 1, 2], [48], [5, 6, 1, 29, 7]]
NAMES = ("out", "x", "weight", "bias", "q_norm", "k_norm")


class Case(NamedTuple):
    """A block: heads of all TP ranks, ranks of the all-to-all, and heads of a stage on one."""

    heads: int
    kv_heads: int
    ulysses: int
    heads_per_stage: int
    causal: bool = True
    documents: bool = False
    bias: bool = True
    norms: bool = True
    table: bool = True

    def __str__(self) -> str:
        without = [name for name in ("bias", "norms", "table") if not getattr(self, name)]
        return "-".join(
            [
                f"{self.heads}/{self.kv_heads} heads over {self.ulysses}",
                f"{self.heads_per_stage} a stage",
                "causal" if self.causal else "full",
                *(["documents"] if self.documents else []),
                *(f"no {name}" for name in without),
            ]
        )


class Whole(NamedTuple):
    """What the block computes with, whole; None where the case has none."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    grad_out: Tensor
    table: tuple[Tensor, Tensor] | None


class RmsNorm(nn.Module):
    """The formula as a module of one parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, t: Tensor) -> Tensor:
        return rms_norm(t, self.weight, EPS)


@cache
def rotation() -> tuple[Tensor, Tensor]:
    """Return cos and sin, [S, b, 1, D/2] and rounded to fp32, of positions in any order."""
    generator = torch.Generator().manual_seed(1)
    positions = here(torch.randint(0, 500, (BATCH, LENGTH), generator=generator, device="cpu"))
    cos, sin = (t.transpose(0, 1)[:, :, None] for t in rope_table(positions, 100, HEAD_DIM))
    return cos.float(), sin.float()


def whole(case: Case) -> Whole:
    rows = (case.heads + 2 * case.kv_heads) * HEAD_DIM
    x, weight, bias, q_norm, k_norm, grad_out = made_up(
        (LENGTH, BATCH, HIDDEN), (rows, HIDDEN), (rows,), (HEAD_DIM,), (HEAD_DIM,),
        (LENGTH, BATCH, case.heads, HEAD_DIM),
    )  # fmt: skip
    return Whole(
        x,
        weight,
        bias if case.bias else None,
        q_norm if case.norms else None,
        k_norm if case.norms else None,
        grad_out,
        rotation() if case.table else None,
    )


@cache
def expected(case: Case) -> dict[str, Tensor]:
    """Return the output and every gradient by the formula."""
    given = whole(case)
    leaves = {
        name: getattr(given, name).requires_grad_()
        for name in NAMES[1:]
        if getattr(given, name) is not None
    }
    out = attention_block(
        leaves["x"],
        leaves["weight"],
        leaves.get("bias"),
        (leaves["q_norm"], leaves["k_norm"]) if case.norms else None,
        None if given.table is None else (given.table[0].double(), given.table[1].double()),
        heads=case.heads,
        kv_heads=case.kv_heads,
        eps=EPS,
        causal=case.causal,
        documents=MANY if case.documents else None,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), given.grad_out)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def computed(
    case: Case,
    *,
    cp: dist.ProcessGroup,
    tp: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> dict[str, Tensor]:
    """Return this rank's output and gradients, those of parameters summed over the ranks.

    With `tp` this rank has its share of the heads, and of its tokens with `sequence_parallel`.
    """
    share, shares = (0, 1) if tp is None else (dist.get_rank(tp), dist.get_world_size(tp))
    given, mine = whole(case), shard_of(LENGTH, dist.get_rank(cp), dist.get_world_size(cp))
    tokens = given.x[mine]
    x = (tokens.chunk(shares)[share] if sequence_parallel else tokens).clone().requires_grad_()
    weight = given.weight.chunk(shares)[share].clone().requires_grad_()
    bias = None if given.bias is None else given.bias.chunk(shares)[share].clone().requires_grad_()
    projection = Projection(
        weight=weight,
        bias=bias,
        heads=case.heads // shares,
        kv_heads=case.kv_heads // shares,
        head_dim=HEAD_DIM,
        q_norm=None if given.q_norm is None else RmsNorm(given.q_norm),
        k_norm=None if given.k_norm is None else RmsNorm(given.k_norm),
    )
    groups = split_group(cp, case.ulysses)
    block = HeadChunked(
        projection=projection,
        stages=HeadStages(
            heads=case.heads // shares,
            kv_heads=case.kv_heads // shares,
            ranks=case.ulysses,
            heads_per_stage=case.heads_per_stage,
        ),
        kernel=groups.kernel(kernel()),
        ulysses=groups.ulysses,
        tensor_parallel=TensorParallel(group=tp, sequence_parallel=sequence_parallel),
        table=None if given.table is None else (given.table[0][mine], given.table[1][mine]),
        causal=case.causal,
        documents=Documents.of(MANY) if case.documents else None,
    )
    out = head_chunked_attention(x, block)
    out.backward(given.grad_out[mine].chunk(shares, dim=2)[share])
    found = {"out": out.detach(), "x": x.grad}
    for name, parameter in zip(parameter_names(case), projection.parameters(), strict=True):
        found[name] = parameter.grad
        dist.all_reduce(parameter.grad, group=cp)
        if tp is not None and name in ("q_norm", "k_norm"):  # their heads are on other ranks too
            dist.all_reduce(parameter.grad, group=tp)
    return found


def parameter_names(case: Case) -> list[str]:
    bias, norms = ["bias"] * case.bias, ["q_norm", "k_norm"] * case.norms
    return ["weight", *bias, *norms]


def parts(
    case: Case, mine: list[int], share: int = 0, shares: int = 1, *, sequence_parallel: bool = False
) -> dict[str, Tensor]:
    """Return what `computed` must return on a rank with the tokens `mine`."""
    right = dict(expected(case._replace(ulysses=1, heads_per_stage=case.heads)))
    right["out"] = right["out"][mine].chunk(shares, dim=2)[share]
    right["x"] = right["x"][mine]
    if sequence_parallel:
        right["x"] = right["x"].chunk(shares)[share]
    for name in ("weight", "bias"):
        if name in right:
            right[name] = right[name].chunk(shares)[share]
    return right


def largest_difference(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert ours.keys() == right.keys()
    return max((ours[name] - right[name]).abs().max().item() for name in ours)
