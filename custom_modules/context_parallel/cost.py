# SPDX-License-Identifier: Apache-2.0
"""Memory and traffic of an attention block on a rank, by kind: the formulas of the modules as code.

Does not import torch: the planner uses it, `longhaul probe cp` prints it next to its measurements,
and tests compare it with the modules byte by byte. The formula of a kind is derived in its module
(`custom_modules.context_parallel.ring`, `custom_modules.context_parallel.ulysses`,
`custom_modules.context_parallel.head_chunked`); the hybrids are their composition: the ring's terms
over the heads and tokens that it gets from the all-to-all.

Counted in head slices, e = s * b * D elements of this rank, and turned into bytes at the end. For
`ring`, `ulysses` and `hybrid` without stages q, k, v are given and counted; with stages the block
begins at x, which is not. Not counted: rotary tables, weights, workspaces of a kernel. Of a window
(`custom_modules.attention.window`, `custom_modules.context_parallel.halo`) the sums in fp32, the
part that is turned round, its results, and the halo.
"""

from dataclasses import dataclass
from typing import NamedTuple

from custom_modules.context_parallel.config import Degrees


class _Exchange(NamedTuple):
    """Head slices of what is sent to the ranks that attend with it."""

    projected: float
    arriving: float
    packed: float

    @property
    def peak(self) -> float:
        """While it is packed."""
        return self.projected + self.arriving + self.packed

    @property
    def flying(self) -> float:
        """While its messages are in flight."""
        return self.arriving + self.packed


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """The attention of one layer on one rank."""

    degrees: Degrees
    heads: int
    """Query heads of this TP rank; so are the KV heads."""
    kv_heads: int
    head_dim: int
    tokens: int
    """Tokens of this rank: the sequence over CP."""
    batch: int = 1
    element_bytes: int = 2
    causal: bool = True
    ring_rank: int = 1
    """Place in the ring. If causal, keys of earlier ranks meet all queries of this one, keys of
    later ranks half of them; the default has the highest peak."""
    window: int | None = None
    """Tokens that a token attends to; None: all before it."""

    @property
    def slice_bytes(self) -> int:
        """Bytes of one head of this rank's tokens."""
        return self.tokens * self.batch * self.head_dim * self.element_bytes

    @property
    def heads_of_kernel(self) -> tuple[int, int]:
        """Query and KV heads of a call of the kernel, in slices of this rank's tokens."""
        if self.degrees.heads_per_stage is not None:
            return self._stage, self._held_kv
        return self.heads, self.kv_heads if self.degrees.ulysses == 1 else self._inner_kv

    @property
    def forward_peak(self) -> int:
        """Peak of live bytes in the forward."""
        if self.degrees.heads_per_stage is not None:
            return self._bytes(self._staged_forward())
        inner = self._inner_kv
        given = self.heads + 2 * self.kv_heads
        if self.degrees.ulysses == 1:
            return self._bytes(given + self._kernel_forward(self.heads, self.kv_heads))
        home = self.heads * (2 + self._lse) + self._messages(self.heads)
        phases = (self._kernel_forward(self.heads, inner), home)
        return self._bytes(given + self.heads + 2 * inner + max(phases))

    @property
    def backward_peak(self) -> int:
        """Peak of live bytes in the backward, including the output and its gradient.

        The given q, k and v are counted if they are kept, without an all-to-all. With stages the
        gradients of x and of the weights are added.
        """
        lse, inner = self.heads * self._lse, self._inner_kv
        if self.degrees.heads_per_stage is not None:
            return self._bytes(2 * self.heads + lse + self._staged_backward())
        kept = lse + 2 * self.heads
        if self.degrees.ulysses == 1:
            kept += self.heads + 2 * self.kv_heads
            return self._bytes(kept + self._kernel_backward(self.heads, self.kv_heads))
        kept += 3 * self.heads + 2 * inner
        return self._bytes(kept + self._kernel_backward(self.heads, inner))

    @property
    def forward_sent(self) -> int:
        """Bytes that the rank sends in the forward."""
        u, c = self.degrees.ulysses, self.degrees.ring
        by_ring: float = (c - 1) * 2 * self._inner_kv
        if self._within:
            by_ring = 2 * self._inner_kv * self._halo
        if self.degrees.heads_per_stage is not None:
            by_ring *= self.heads // self.degrees.heads_per_stage * self._held_kv
            by_ring //= self._inner_kv
        exchanged = (u - 1) * (2 * self.heads + 2 * self._inner_kv) / u
        return self._bytes(exchanged + by_ring)

    def _staged_forward(self) -> float:
        """Slices at the worst moment of the forward of head stages, with the output."""
        u, held, in_chunk = self._stage, self._held_kv, self._stages_in_chunk
        stages, exchanges = self.heads // u, self.degrees.ulysses > 1
        keys, queries = self._exchange(keys=held), self._exchange(queries=u)
        home = u * (1 + self._lse) + self._messages(u)

        def attending(before: int, following: _Exchange) -> list[float]:
            """Return the slices of a stage and of the queries of the next one."""
            held_now = 2 * held + before * u * self._lse
            last = before == stages - 1
            return [
                held_now + u + following.peak,
                held_now + u + following.flying + self._kernel_forward(u, held),
                held_now - 2 * held * last + following.flying + home,
            ]

        opening = (stages - in_chunk) * u * self._lse
        peaks = [
            opening + keys.peak,
            opening + keys.flying + queries.projected,
            opening + 2 * held + queries.peak,
            *attending(stages - 1, _Exchange(0, 0, 0)),
        ]
        if exchanges and in_chunk > 1:
            peaks += attending(stages - 2, queries)
        if exchanges and stages > in_chunk:
            before = (stages - in_chunk - 1) * u * self._lse
            peaks.append(before + home + keys.projected)
        return self.heads + max(peaks)

    def _staged_backward(self) -> float:
        """Slices at the worst moment of the backward of head stages, without those it is given."""
        u, held, in_chunk = self._stage, self._held_kv, self._stages_in_chunk
        sums = 2 * held * self._merge if in_chunk > 1 else 0
        if self.degrees.ulysses == 1:
            exchanged = 3 * u if self._strided else u
            return 2 * held + exchanged + self._kernel_backward(u, held) + sums
        opening, queries = self._exchange(queries=u, keys=held), self._exchange(queries=u)
        results = 2 * queries.flying
        peaks = [
            2 * u + opening.peak,
            2 * held + 3 * u + self._kernel_backward(u, held) + sums,
            self._staged_home(sums),
        ]
        if in_chunk > 1:
            here = 2 * held + sums + u
            peaks += [here + 2 * u + self._messages(u), here + queries.flying + results]
        if self.heads // u > in_chunk:
            peaks.append(opening.projected + results)
        return max(peaks)

    def _staged_home(self, sums: float) -> float:
        """Slices while the gradients of queries, keys and values return at the end of a chunk."""
        u, held, merge = self._stage, self._held_kv, self._merge
        arrived = self._exchange(queries=u, keys=held).projected
        if self.kv_heads >= self.degrees.ulysses:
            sent = u + 2 * held
            copied = sums if merge > 1 else 0
            return sent + self._messages(sent) + max(copied, arrived)
        kept = (sums or 2 * held) + arrived
        shared = merge * (self.kv_heads + self._messages(held))
        copied = held * merge if merge > 1 and not sums else 0
        return kept + max(u + self._messages(u), copied + shared)

    def _exchange(self, *, queries: int = 0, keys: int = 0) -> _Exchange:
        """Return what queries, and as many keys as values, take while they are exchanged."""
        if self.degrees.ulysses == 1:
            return _Exchange(queries + 2 * keys, 0, 0)
        replicated = self.kv_heads < self.degrees.ulysses
        own = min(keys, self.kv_heads)
        packed = self._messages(queries, packs=1)
        packed += 2 * own if replicated else self._messages(2 * keys, packs=1)
        return _Exchange(queries + 2 * own, queries + 2 * keys, packed)

    @property
    def _stage(self) -> int:
        """Query heads of a stage (U)."""
        assert self.degrees.heads_per_stage is not None
        return self.degrees.heads_per_stage

    @property
    def _stages_in_chunk(self) -> int:
        """Stages that share the keys and values held."""
        return self.heads * self._held_kv // (self._inner_kv * self._stage)

    @property
    def _inner_kv(self) -> int:
        """KV heads after replication."""
        return max(self.kv_heads, self.degrees.ulysses)

    @property
    def _held_kv(self) -> int:
        """KV heads held at a time by the stages (G)."""
        return min(self._stage, self._inner_kv)

    @property
    def _strided(self) -> bool:
        """Whether a stage's heads are not contiguous in the output, so the kernel gets a copy."""
        per_kv = self._stage // self._held_kv
        return self._held_kv > 1 and 1 < per_kv < self.heads // self._inner_kv

    @property
    def _merge(self) -> float:
        """Bytes of the dtype that partial results are merged in, over the model's."""
        return max(4, self.element_bytes) / self.element_bytes

    @property
    def _lse(self) -> float:
        """The log-sum-exp of a head, in slices."""
        return self._merge / self.head_dim

    def _messages(self, heads: float, *, packs: int | None = None) -> float:
        """Messages of `heads` under way: received, and packed to be sent where b is not 1."""
        u = self.degrees.ulysses
        copies = (1 if self.batch == 1 else 2) if packs is None else packs
        return copies * heads * (u - 1) / u

    def _kernel_forward(self, heads: int, kv_heads: int) -> float:
        """Slices that the kernel, a plain one or a ring, holds in addition to its inputs."""
        ring = self.degrees.ring
        if self._within:
            return self._windowed_forward(heads, kv_heads)
        if ring == 1:
            return heads * (1 + self._lse)
        merge, share = self._merge, 0.5 if self.ring_rank == 0 and self.causal else 1.0
        cast = merge if merge > 1 else 0
        sets = 2 * kv_heads * min(ring - 1, 2)
        own = 2 * kv_heads + heads * (1 + cast + self._lse)
        sums = 2 if cast else 3  # temporaries of the log-sum-exp, next to the part that is merged
        step = sets + heads * (merge + share * (1 + cast) + self._lse * (1 + sums * share))
        return max(own, step)

    def _windowed_forward(self, heads: int, kv_heads: int) -> float:
        """Slices of a window's kernel: sums, and a part's inputs turned round and its result."""
        merge, inputs = self._merge, heads + 2 * kv_heads
        wide = merge if merge > 1 else 0
        turned, on_diagonal, copied = self._squares
        own = heads * max(on_diagonal, turned * max(2, 1 + wide))
        most = max(own, turned * (inputs + heads), copied * inputs + on_diagonal * heads)
        return heads * (merge + self._lse * 2) + most + 4 * kv_heads * self._halo

    def _windowed_backward(self, heads: int, kv_heads: int) -> float:
        grads, inputs = heads + 2 * kv_heads, 3 * heads + 2 * kv_heads
        turned, on_diagonal, copied = self._squares
        most = max(turned * (inputs + grads), copied * inputs + on_diagonal * grads)
        return self._merge * grads + most + 4 * kv_heads * self._halo * (1 + self._merge)

    @property
    def _within(self) -> bool:
        """Whether the window is shorter than the sequence."""
        whole = self.tokens * self.degrees.ulysses * self.degrees.ring
        return self.window is not None and self.window < whole

    @property
    def _squares(self) -> tuple[float, float, float]:
        """Shares of a rank's tokens in parts of a window's kernel.

        Squares before the diagonal, turned round; squares on it; and of these the ones that are
        copied, since blocks of several sequences lie apart. A part is of what follows one another:
        the rank's tokens, or one of the two chunks of a ring rank.
        """
        assert self.window is not None
        whole = self.tokens * self.degrees.ulysses
        run = whole / (2 if self.degrees.ring > 1 else 1)
        squares = int(run // self.window)
        on_diagonal = max(squares * self.window, run % self.window) / whole
        turned = max(0, squares - 1) * self.window / whole
        return turned, on_diagonal, on_diagonal if self.batch > 1 and squares > 1 else 0.0

    @property
    def _halo(self) -> float:
        """Tokens before its two chunks that a ring rank gets, as a share of its own."""
        if self.degrees.ring == 1 or self.window is None:
            return 0.0
        whole = self.tokens * self.degrees.ulysses
        return 2 * min(self.window - 1, whole * (self.degrees.ring - 0.5)) / whole

    def _kernel_backward(self, heads: int, kv_heads: int) -> float:
        ring = self.degrees.ring
        if self._within:
            return self._windowed_backward(heads, kv_heads)
        if ring == 1:
            return heads + 2 * kv_heads
        merge = self._merge
        cast = merge if merge > 1 else 0
        own = 2 * kv_heads + (heads + 2 * kv_heads) * (1 + cast) + 2 * kv_heads * merge
        sets = 2 * kv_heads * min(ring - 1, 2)
        parts: list[float] = [heads + 2 * kv_heads]
        if self.causal:
            earlier: list[float] = [heads + kv_heads] if self.ring_rank > 0 else []
            later = [heads / 2 + 2 * kv_heads] if self.ring_rank < ring - 1 else []
            parts = earlier + later
        return max(own, heads * merge + sets + 4 * kv_heads * merge + max(parts))

    def _bytes(self, slices: float) -> int:
        return round(slices * self.slice_bytes)
