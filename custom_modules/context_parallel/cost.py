# SPDX-License-Identifier: Apache-2.0
"""Memory and traffic of an attention block on a rank, by kind: the formulas of the modules as code.

Does not import torch: the planner uses it, `longhaul probe cp` prints it next to its measurements,
and tests compare it with the modules byte by byte. The formula of a kind is derived in its module
(`custom_modules.context_parallel.ring`, `custom_modules.context_parallel.ulysses`,
`custom_modules.context_parallel.head_chunked`); the hybrids are their composition: the ring's terms
over the heads and tokens that it gets from the all-to-all.

Counted in head slices, e = s * b * D elements of this rank, and turned into bytes at the end. For
`ring`, `ulysses` and `hybrid` without stages q, k, v are given and counted; with stages the block
begins at x, which is not. Not counted: rotary tables, weights, workspaces of a kernel.
"""

from dataclasses import dataclass

from custom_modules.context_parallel.config import Degrees


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

    @property
    def slice_bytes(self) -> int:
        """Bytes of one head of this rank's tokens."""
        return self.tokens * self.batch * self.head_dim * self.element_bytes

    @property
    def forward_peak(self) -> int:
        """Peak of live bytes in the forward."""
        inner = self._inner_kv
        if self.degrees.heads_per_stage is not None:
            u, held = self.degrees.heads_per_stage, self._held_kv
            exchanged = 0 if self.degrees.ulysses == 1 else u
            earlier = (self.heads - u) * self._lse
            stage = (
                u + exchanged + self._messages(u, packs=1) + earlier,
                u + self._kernel_forward(u, held) + earlier,
                u + u * (1 + self._lse) + self._messages(u) + earlier,
            )
            return self._bytes(self.heads + 2 * held + max(stage))
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
            u, held = self.degrees.heads_per_stage, self._held_kv
            exchanged = 3 * u if self.degrees.ulysses > 1 or self._strided else u
            dq = 0 if self.degrees.ulysses == 1 else u + self._messages(u)
            kept = 2 * self.heads + lse + 2 * held * (1 + self._merge) + exchanged
            if self.kv_heads < self.degrees.ulysses:  # sums of several ranks, in fp32
                home = self._merge * (self.kv_heads + self._messages(held))
            else:
                home = (2 if self._merge > 1 else 1) * held + self._messages(held)
            home = 0 if self.degrees.ulysses == 1 else home
            return self._bytes(kept + max(self._kernel_backward(u, held), u + dq, home))
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
        by_ring = (c - 1) * 2 * self._inner_kv
        if self.degrees.heads_per_stage is not None:
            by_ring *= self.heads // self.degrees.heads_per_stage * self._held_kv
            by_ring //= self._inner_kv
        exchanged = (u - 1) * (2 * self.heads + 2 * self._inner_kv) / u
        return self._bytes(exchanged + by_ring)

    @property
    def _inner_kv(self) -> int:
        """KV heads after replication."""
        return max(self.kv_heads, self.degrees.ulysses)

    @property
    def _held_kv(self) -> int:
        """KV heads held at a time by the stages (G)."""
        assert self.degrees.heads_per_stage is not None
        return min(self.degrees.heads_per_stage, self._inner_kv)

    @property
    def _strided(self) -> bool:
        """Whether a stage's heads are not contiguous in the output, so the kernel gets a copy."""
        assert self.degrees.heads_per_stage is not None
        per_kv = self.degrees.heads_per_stage // self._held_kv
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
        if ring == 1:
            return heads * (1 + self._lse)
        merge, share = self._merge, 0.5 if self.ring_rank == 0 and self.causal else 1.0
        cast = merge if merge > 1 else 0
        sets = 2 * kv_heads * min(ring - 1, 2)
        own = 2 * kv_heads + heads * (1 + cast + self._lse)
        sums = 2 if cast else 3  # temporaries of the log-sum-exp, next to the part that is merged
        step = sets + heads * (merge + share * (1 + cast) + self._lse * (1 + sums * share))
        return max(own, step)

    def _kernel_backward(self, heads: int, kv_heads: int) -> float:
        ring = self.degrees.ring
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
