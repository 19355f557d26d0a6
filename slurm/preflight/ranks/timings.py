# SPDX-License-Identifier: Apache-2.0
"""Times of this rank alone, of its links by pairs, and of the job's collectives.

A slow rank makes all wait in a collective, so the time of a collective does not identify the slow
rank. Two measurements do:

1. each rank's own time for a matrix product and for a copy, without any other rank;
2. each rank's times with one partner at a time, in the rounds of a tournament, so that a rank has
   times with several partners: if even the best of them is slow, the rank is at fault.

Links inside a node and between nodes differ, so each has a tournament: among the ranks of a node,
and among the ranks at the same place in all nodes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MOST_ROUNDS = 7
"""Rounds of each tournament: all pairs of a node of 8, and 7 partners of each node."""
MOST_REPEATS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of messages and matrices."""

    message: int
    """Bytes of a collective, on each rank."""
    pair: int
    """Bytes that partners send each other."""
    product: int
    """Rows of the square matrices."""


ON_GPU = Sizes(message=256 * 2**20, pair=64 * 2**20, product=4096)
ON_CPU = Sizes(message=4 * 2**20, pair=2**20, product=192)


@dataclass(kw_only=True, slots=True)
class Times:
    """Times that one rank measured, in seconds."""

    product: float
    copy: float
    inside: dict[int, float]
    """The quickest exchange with each partner of the same node."""
    across: dict[int, float]
    """The same with partners of other nodes."""
    collectives: dict[str, float]
    """all-reduce, all-to-all and ring: the mean of several."""
    message: int
    """Bytes of the collectives."""


def tournament(
    players: Sequence[int], most_rounds: int | None = None
) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each player meets every other once (circle method).

    `most_rounds` ends it early: all rounds of n players are n squared.
    """
    ring = [*players, *([-1] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1)[:most_rounds]:
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def schedule(hosts: Sequence[str]) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Return the rounds inside nodes and those across, each with the partner of every playing rank.

    `hosts` is the node of each rank.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    most = max(len(ranks) for ranks in by_host.values())
    columns = [
        [ranks[place] for ranks in by_host.values() if place < len(ranks)] for place in range(most)
    ]
    return _merged(list(by_host.values())), _merged(columns)


def _merged(groups: list[list[int]]) -> list[dict[int, int]]:
    """Return the rounds of concurrent tournaments, merged."""
    rounds: list[dict[int, int]] = []
    for group in groups:
        for number, pairs in enumerate(tournament(group, MOST_ROUNDS) if len(group) > 1 else []):
            while len(rounds) <= number:
                rounds.append({})
            for one, other in pairs:
                rounds[number] |= {one: other, other: one}
    return rounds


def exchange(out: Tensor, into: Tensor, to: int, source: int) -> None:
    """Send `out` to a rank while receiving `into` from another."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
    )
    for work in works:
        work.wait()


def product(square: Tensor) -> Tensor:
    """Return the product of a square matrix with itself."""
    return square @ square


class Bench:
    """Measures on one rank; every rank must call the same in the same order."""

    def __init__(self, device: torch.device, sizes: Sizes, seconds: float) -> None:
        """Take the device, the sizes, and the time limit of all measurements together."""
        self.device, self.sizes, self.seconds = device, sizes, seconds
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def times(self, hosts: Sequence[str]) -> Times:
        """Return the times of this rank; `hosts` is the node of each rank."""
        inside, across = schedule(hosts)
        kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        rows = self.sizes.product
        square = torch.zeros(rows, rows, dtype=kind, device=self.device)
        message = self._buffer(self.sizes.message, kind)
        target = torch.empty_like(message)
        self._settle()
        own = self._quickest(lambda: product(square), 0.05)
        copy = self._quickest(lambda: target.copy_(message), 0.05)
        share = 0.4 / max(1, len(inside) + len(across))
        pair, back = (self._buffer(self.sizes.pair, kind) for _ in range(2))
        met_inside = self._rounds(inside, pair, back, share)
        met_across = self._rounds(across, pair, back, share)
        collectives = {
            "all-reduce": self._mean(lambda: dist.all_reduce(message), 0.2),
            "all-to-all": self._mean(lambda: self._all_to_all(message, target), 0.2),
            "ring": self._mean(lambda: self._around(message, target), 0.1),
        }
        return Times(
            product=own, copy=copy, inside=met_inside, across=met_across, collectives=collectives,
            message=message.nbytes,
        )  # fmt: skip

    def _buffer(self, size: int, kind: torch.dtype) -> Tensor:
        """Return zeros of about `size` bytes, divisible into equal parts for all ranks."""
        numbers = max(1, size // kind.itemsize // self.size) * self.size
        return torch.zeros(numbers, dtype=kind, device=self.device)

    def _all_to_all(self, message: Tensor, target: Tensor) -> None:
        dist.all_to_all_single(target, message)

    def _around(self, message: Tensor, target: Tensor) -> None:
        if self.size > 1:
            exchange(message, target, (self.rank + 1) % self.size, (self.rank - 1) % self.size)

    def _rounds(
        self, rounds: list[dict[int, int]], out: Tensor, into: Tensor, share: float
    ) -> dict[int, float]:
        """Return the quickest exchange with the partner of each round; a rank may have none."""
        met = {}
        for partners in rounds:
            partner = partners.get(self.rank)

            def play(partner: int | None = partner) -> None:
                if partner is not None:
                    exchange(out, into, partner, partner)

            took = self._quickest(play, share, together=True)
            if partner is not None:
                met[partner] = took
        return met

    def _once(self, run: Callable[[], object]) -> float:
        begun = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def _repeats(self, run: Callable[[], object], share: float) -> int:
        """Run once to warm up, once for the time; return how many fit, the same on all ranks."""
        self._once(run)
        took = torch.tensor([self._once(run)], dtype=torch.float64, device=self.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return max(2, min(MOST_REPEATS, int(share * self.seconds / max(float(took), 1e-6))))

    def _quickest(
        self, run: Callable[[], object], share: float, *, together: bool = False
    ) -> float:
        """Return the quickest of several runs, since noise only adds. Partners begin `together`."""
        found = []
        for _ in range(self._repeats(run, share)):
            if together:
                self._settle()
            found.append(self._once(run))
        return min(found)

    def _mean(self, run: Callable[[], object], share: float) -> float:
        """Return the mean of several runs that follow each other, as nccl-tests measures."""
        repeats = self._repeats(run, share)
        self._settle()

        def several() -> None:
            for _ in range(repeats):
                run()

        return self._once(several) / repeats

    def _settle(self) -> None:
        """Wait for the device, then for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
