# SPDX-License-Identifier: Apache-2.0
"""Context parallelism beside its peers, on gloo ranks of this machine: time and bytes.

    python -m benchmarks.context_parallel --ranks 2 --seq 8192

Claim: of the same kind, ours takes at most 1.05 times a peer's time and no more bytes.

Two blocks, each with grouped and with full KV heads, causal, fp32:

* attention, from q, k, v that are there: ours `ulysses` against DeepSpeed and yunchang, ours `ring`
  against PyTorch's ring; `hybrid` beside them where there are ranks for two levels;
* from x: projection, rotation, attention, where head-chunked attention begins. DeepSpeed gets the
  same projection and rotation before it.

How they are measured: `benchmarks.harness.rounds`. What runs of the peers, and how:
`benchmarks.harness.peers`.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.machine import facts
from benchmarks.harness.page import mebibytes, milliseconds, page, table, write
from benchmarks.harness.peers import DEEPSPEED, LEFT_OUT, PEERS, Peer, attend_whole
from benchmarks.harness.ranks import on_ranks
from benchmarks.harness.rounds import Contestant, Problem, Result, measure
from custom_modules.attention.documents import chunks_of
from custom_modules.attention.qkv_projection import Projection
from custom_modules.attention.registry import kernel_for
from custom_modules.context_parallel.attend import attend, split_group
from custom_modules.context_parallel.config import fits_ulysses, stage_sizes
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies, rotary_table, rotate
from custom_modules.tensor_parallel import TensorParallel

MOST_TIME, MOST_BYTES = 1.05, 1.0
"""Of a peer's, that the claim allows."""
Table = tuple[Tensor, Tensor]
"""cos and sin of a shard's positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is attended over, by how many ranks."""

    seq: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rounds: int


class Block:
    """The contestants of one setting on this rank."""

    def __init__(self, setting: Setting, group: dist.ProcessGroup) -> None:
        """Draw the same whole tensors on every rank."""
        self.setting, self.group = setting, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.kernel = kernel_for(torch.device("cpu"), torch.float32, setting.head_dim)
        self.draw = torch.Generator().manual_seed(0)

    def from_qkv(self) -> list[Result]:
        """Measure attention alone."""
        of = self.setting
        q, k, v, grad_out = (
            self._drawn(of.seq, of.batch, heads, of.head_dim)
            for heads in (of.heads, of.kv_heads, of.kv_heads, of.heads)
        )
        problem = Problem.of(_seq_first(attend_whole), (q, k, v), grad_out)
        ours = [self._ours(kind, degree) for kind, degree in self._degrees()]
        made, missing = self._made(PEERS, lambda attend, _: attend, batch_first=True)
        return [*measure(problem, [*ours, *made], of.rounds, self.group), *missing]

    def from_x(self) -> list[Result]:
        """Measure projection, rotation and attention."""
        of = self.setting
        x = self._drawn(of.seq, of.batch, of.hidden)
        rows = (of.heads + 2 * of.kv_heads) * of.head_dim
        weight = self._drawn(rows, of.hidden) / of.hidden**0.5
        grad_out = self._drawn(of.seq, of.batch, of.heads, of.head_dim)
        whole = partial(
            self._projected, _seq_first(attend_whole), self._table(torch.arange(of.seq))
        )
        problem = Problem.of(whole, (x,), grad_out, (weight,))
        contestants = []
        if fits_ulysses(of.heads, of.kv_heads, self.size):
            ulysses, table = self._ours("ulysses", self.size), self._table(self._zigzag())
            contestants = [
                Contestant(
                    name=ulysses.name,
                    kind="ulysses",
                    positions=ulysses.positions,
                    attend=partial(self._projected, ulysses.attend, table),
                ),
                Contestant(
                    name="ours, head_chunked",
                    kind="head_chunked",
                    positions=ulysses.positions,
                    attend=partial(self._head_chunked, table),
                ),
            ]
        made, missing = self._made(
            [DEEPSPEED],
            lambda attend, table: partial(self._projected, _seq_first(attend), table),
            batch_first=False,
        )
        return [*measure(problem, [*contestants, *made], of.rounds, self.group), *missing]

    def _degrees(self) -> Iterator[tuple[str, int]]:
        """Yield the kinds that these ranks and heads allow, with the ranks of the all-to-all."""
        of = self.setting
        inner = [
            n for n in range(2, self.size + 1)
            if self.size % n == 0 and fits_ulysses(of.heads, of.kv_heads, n)
        ]  # fmt: skip
        if self.size in inner:
            yield "ulysses", self.size
        yield "ring", 1
        yield from (("hybrid", n) for n in inner if n < self.size)

    def _ours(self, kind: str, degree: int) -> Contestant:
        groups = split_group(self.group, degree)
        within = f" of {degree} x {self.size // degree}" if kind == "hybrid" else ""
        return Contestant(
            name=f"ours, {kind}{within}",
            kind=kind,
            positions=self._zigzag(),
            attend=partial(attend, kernel=self.kernel, groups=groups, causal=True),
        )

    def _made(
        self,
        peers: list[Peer],
        block: Callable[[Callable[..., Tensor], Table], Callable[..., Tensor]],
        *,
        batch_first: bool,
    ) -> tuple[list[Contestant], list[Result]]:
        """Return the peers that can run in a block, and results that say why others cannot."""
        made, missing = [], []
        for peer in peers:
            positions = self._zigzag() if peer.sharding == "zigzag" else self._contiguous()
            reason = peer.missing
            if not reason:
                try:
                    attend = peer.made(self.group)
                except Exception as raised:  # as its imports may
                    reason = f"fails to start: {type(raised).__name__}: {raised}".splitlines()[0]
            if reason:
                missing.append(Result(peer.name, peer.kind, reason))
                continue
            made.append(
                Contestant(
                    name=peer.name,
                    kind=peer.kind,
                    positions=positions,
                    attend=block(attend, self._table(positions)),
                    batch_first=batch_first,
                )
            )
        return made, missing

    def _projected(
        self, attend: Callable[..., Tensor], table: Table, x: Tensor, weight: Tensor
    ) -> Tensor:
        """Attend over x [s, b, hidden]; the weight has Megatron's order, by KV head."""
        of = self.setting
        group = of.heads // of.kv_heads
        mixed = torch.nn.functional.linear(x, weight)
        q, k, v = mixed.unflatten(2, (of.kv_heads, group + 2, of.head_dim)).split([group, 1, 1], 3)
        return attend(rotate(q.flatten(2, 3), *table), rotate(k[:, :, :, 0], *table), v[:, :, :, 0])

    def _head_chunked(self, table: Table, x: Tensor, weight: Tensor) -> Tensor:
        of = self.setting
        stages = HeadStages(
            heads=of.heads,
            kv_heads=of.kv_heads,
            ranks=self.size,
            heads_per_stage=stage_sizes(of.heads, of.kv_heads, self.size)[0],
        )
        projection = Projection(
            weight=weight, bias=None, heads=of.heads, kv_heads=of.kv_heads,
            head_dim=of.head_dim, q_norm=None, k_norm=None,
        )  # fmt: skip
        block = HeadChunked(
            projection=projection,
            stages=stages,
            kernel=self.kernel,
            ulysses=split_group(self.group, self.size).ulysses,
            tensor_parallel=TensorParallel(group=None, sequence_parallel=False),
            table=table,
            causal=True,
            documents=None,
        )
        return head_chunked_attention(x, block)

    def _table(self, positions: Tensor) -> Table:
        scaling = RopeScaling.base_change(500_000)
        frequencies, _ = inverse_frequencies(scaling, self.setting.head_dim)
        return rotary_table(positions[None].expand(self.setting.batch, -1), frequencies)

    def _zigzag(self) -> Tensor:
        chunks = torch.arange(self.setting.seq).chunk(2 * self.size)
        return torch.cat([chunks[index] for index in chunks_of(self.rank, self.size)])

    def _contiguous(self) -> Tensor:
        return torch.arange(self.setting.seq).chunk(self.size)[self.rank]

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw)


def _seq_first(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of [s, b, h, D] for one of [b, s, h, D]: a view where b is 1."""
    return lambda *qkv: attend(*(t.transpose(0, 1) for t in qkv)).transpose(0, 1)


def _on_rank(settings: list[Setting]) -> list[tuple[list[Result], list[Result]]]:
    """Return the results of both blocks of each setting."""
    group = dist.group.WORLD
    assert group is not None
    blocks = [Block(setting, group) for setting in settings]
    return [(block.from_qkv(), block.from_x()) for block in blocks]


PAIRS: dict[Literal["qkv", "x"], dict[str, list[str]]] = {
    "qkv": {"ulysses": ["ulysses"], "ring": ["ring"]},
    "x": {"ulysses": ["ulysses"], "head_chunked": ["ulysses"]},
}
"""Of each kind of ours, the kinds of peers it is compared with."""


def section(title: str, results: list[Result], pairs: dict[str, list[str]]) -> str:
    """Return the tables of one block: what was measured, and ours over the peers."""
    measured = [
        [one.name, one.kind, *(["-"] * 5), one.reason]
        if one.reason
        else [
            one.name, one.kind, f"{one.error:.0e}", *map(milliseconds, one.seconds),
            mebibytes(one.peak_bytes), "",
        ]
        for one in results
    ]  # fmt: skip
    head = [
        "attention",
        "kind",
        "error",
        "forward ms",
        "backward ms",
        "both ms",
        "peak MiB",
        "note",
    ]
    ours = [one for one in results if one.name.startswith("ours") and not one.reason]
    rows = [
        [mine.name, peer.name, *_ratios(mine, peer)]
        for mine in ours
        for peer in results
        if peer not in ours and not peer.reason and peer.kind in pairs.get(mine.kind, [])
    ]
    head_of_ratios = ["ours", "over", "forward", "backward", "both", "bytes", "claim"]
    ratios = table(head_of_ratios, rows) if rows else "No peer of the same kind ran."
    return "\n\n".join([f"## {title}", table(head, measured), ratios])


def _ratios(ours: Result, peer: Result) -> list[str]:
    time = [mine / theirs for mine, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    size = ours.peak_bytes / peer.peak_bytes
    missed = ["slower"] * (time[2] > MOST_TIME) + ["heavier"] * (size > MOST_BYTES)
    return [*(f"{ratio:.3f}" for ratio in (*time, size)), " and ".join(missed) or "holds"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_parallel",
        description="Time and bytes of context parallelism beside its peers, on CPU.",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192, help="tokens over all ranks")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512, help="width of x")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds until ranks are ended")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    if given.ranks < 2:
        parser.error(f"--ranks is {given.ranks}; a sequence is shared by 2 or more")
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; it must be at least 1")
    if given.seq % (2 * given.ranks):
        parser.error(f"--seq {given.seq:,} is not divisible by 2 x ranks = {2 * given.ranks}")
    uneven = [kv for kv in given.kv_heads if given.heads % kv]
    if uneven:
        parser.error(f"--heads {given.heads} cannot share --kv-heads {uneven[0]} evenly")
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    given = _arguments()
    settings = [
        Setting(
            seq=given.seq,
            batch=given.batch,
            heads=given.heads,
            kv_heads=kv_heads,
            head_dim=given.head_dim,
            hidden=given.hidden,
            rounds=given.rounds,
        )
        for kv_heads in given.kv_heads
    ]
    answers = on_ranks(given.ranks, _on_rank, settings, timeout_seconds=given.timeout)
    sections = [
        f"{given.ranks} gloo ranks, {given.seq:,} tokens x {given.batch}, heads of "
        f"{given.head_dim}, fp32, causal, width {given.hidden}; medians of {given.rounds} rounds. "
        f"Peak: this rank's inputs and output gradient counted. The claim holds for ours over a "
        f"peer at {MOST_TIME} of the time of both and {MOST_BYTES} of the bytes."
    ]
    for setting, (from_qkv, from_x) in zip(settings, answers[0], strict=True):
        heads = f"{setting.heads} heads, {setting.kv_heads} KV heads"
        sections += [
            section(f"{heads}: attention", from_qkv, PAIRS["qkv"]),
            section(f"{heads}: projection, rotation, attention", from_x, PAIRS["x"]),
        ]
    sections.append(
        "Left out:\n\n" + "\n".join(f"* {name}: {reason}." for name, reason in LEFT_OUT.items())
    )
    packages = [peer.package for peer in PEERS if peer.package != "torch"]
    text = page("Context parallelism beside its peers", facts(packages), sections)
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
