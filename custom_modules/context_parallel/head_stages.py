# SPDX-License-Identifier: Apache-2.0
"""The order in which head-chunked attention attends with its heads.

h query heads share g KV heads in runs of neighbours, and C ranks of an all-to-all share both. U
query heads make a stage. The stages whose queries share the same G KV heads make a chunk, for which
these are held. All of it is arithmetic on the numbers of heads: `custom_modules.context_parallel.
head_chunked` runs the stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from custom_modules.context_parallel.config import require_stage
from custom_modules.context_parallel.ulysses import require_heads


class Stage(NamedTuple):
    """The query heads that are attended with at a time, and the keys and values they need."""

    chunk: slice
    """Virtual KV heads that are held."""
    kv_heads: slice
    """The true ones."""
    queries: slice
    """Query heads, counted within each KV head."""
    opens: bool
    """Whether it is the first stage of its chunk."""
    closes: bool
    """Whether it is the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadStages:
    """Assignment of heads to stages.

    Query heads share a KV head in runs of neighbours. With fewer KV heads than ranks, each counts
    as C/g "virtual" heads, one a rank.
    """

    heads: int
    kv_heads: int
    ranks: int
    heads_per_stage: int

    def __post_init__(self) -> None:
        """Refuse heads that the ranks cannot share, and stages without whole groups."""
        require_heads(self.heads, self.kv_heads, self.ranks)
        require_stage(self.heads_per_stage, self.heads, self.kv_heads, self.ranks)

    @property
    def virtual(self) -> int:
        """KV heads after replication."""
        return max(self.kv_heads, self.ranks)

    @property
    def replicated(self) -> bool:
        """Whether a KV head goes to several ranks."""
        return self.kv_heads < self.ranks

    @property
    def group(self) -> int:
        """Query heads of each virtual KV head."""
        return self.heads // self.virtual

    @property
    def kv_per_chunk(self) -> int:
        """Virtual KV heads that are held at a time (G)."""
        return min(self.heads_per_stage, self.virtual)

    @property
    def per_kv(self) -> int:
        """Query heads of each KV head in one stage."""
        return self.heads_per_stage // self.kv_per_chunk

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Yield the virtual and the true KV heads held together."""
        for start in range(0, self.virtual, self.kv_per_chunk):
            held = slice(start, start + self.kv_per_chunk)
            yield held, held if self.virtual == self.kv_heads else slice(0, self.kv_heads)

    def stages(self) -> Iterator[slice]:
        """Yield the query heads, counted within each KV head, of the stages of a chunk."""
        for start in range(0, self.group, self.per_kv):
            yield slice(start, start + self.per_kv)

    def order(self) -> list[tuple[Stage, Stage | None]]:
        """Return all stages in the order in which they run, each with the one that follows."""
        within = list(self.stages())
        stages = [
            Stage(chunk, kv_heads, queries, queries == within[0], queries == within[-1])
            for chunk, kv_heads in self.chunks()
            for queries in within
        ]
        return list(zip(stages, [*stages[1:], None], strict=True))

    def query_heads(self, chunk: slice, stage: slice) -> list[int]:
        """Return the query heads of a stage, those of a KV head together."""
        return [
            kv * self.group + query
            for kv in range(chunk.start, chunk.stop)
            for query in range(stage.start, stage.stop)
        ]

    def of(self, t: Tensor, chunk: slice, stage: slice) -> list[Tensor]:
        """Return the heads of a stage in `t` [s, b, h, D] by rank, [s, b, G/C, U/G, D] views."""
        heads = t.unflatten(2, (self.virtual, self.group))[:, :, chunk, stage]
        return list(heads.tensor_split(self.ranks, dim=2))
