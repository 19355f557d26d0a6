# SPDX-License-Identifier: Apache-2.0
"""Seconds of attention and of its ring, in layers without and with a window.

Of a layer with a window of W tokens the kernels compute squares of W tokens and merge them
(`custom_modules.attention.window`). Over a ring each rank gets the W - 1 keys and values before
each of its two chunks from their owners, and sends their gradients back
(`custom_modules.context_parallel.halo`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from recipes.planner.documents import WHOLE, Attended, in_window
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster

TERA = 1e12


class Seconds(NamedTuple):
    """Seconds of the attention of some layers, of one micro-batch."""

    forward: float
    backward: float
    repeated: float
    """Of the forward that is recomputed."""


class Attention:
    """Attention of a pipeline stage on a rank."""

    def __init__(
        self, workload: Workload, cluster: Cluster, numbers: Sequence[int], again: float
    ) -> None:
        """Take the stage's layers by number, and the recomputed share of attention's forward."""
        self.workload, self.cluster, self.again = workload, cluster, again
        self.local = workload.windowed(numbers)
        """Layers with a window."""
        self.full = len(numbers) - self.local
        self.attended = self._attended(None)
        self.in_window = self.attended
        if workload.window is not None:
            self.in_window = self._attended(workload.window)

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of a token of the whole model, within its document."""
        card, length = self.workload.card, self.workload.seq_length
        local = self.workload.windowed(range(1, card.layers + 1))
        if not local:
            return card.flops_per_token(round(length * self.attended.pairs))
        pairs = (card.layers - local) * self.attended.pairs + local * self.in_window.pairs
        return 6 * (card.matmul_parameters + round(card.heads * card.head_dim * pairs * length))

    def of_full(self) -> Seconds:
        """Return the seconds of layers without a window."""
        peak = self._peak
        if self.workload.degrees.ring > 1:  # queries and keys of a step: a chunk, half of a shard
            peak /= 1 + self.cluster.efficiency.ring_block / self._chunk
        return self._products(self.full, self.attended.mean, peak)

    def of_local(self) -> Seconds:
        """Return the seconds of layers with a window."""
        peak, window = self._peak, self.workload.window
        if window is not None and self.workload.degrees.ring > 1 and self._chunk < window:
            block = self.cluster.efficiency.ring_block
            peak *= (1 + block / window) / (1 + block / self._chunk)
        return self._products(self.local, self.in_window.mean, peak)

    def waiting(self) -> float:
        """Return the seconds of a micro-batch spent waiting for ranks with longer documents."""
        found = sum(self.of_full()) * (self.attended.slowest / self.attended.mean - 1)
        if self.local:
            found += sum(self.of_local()) * (self.in_window.slowest / self.in_window.mean - 1)
        return found

    def merged_bytes(self) -> tuple[float, float]:
        """Return the bytes of device memory moved to merge the parts of windows: both directions.

        Of each of two parts q, k and v are copied, and for one turned round; the results are turned
        back and added in fp32.
        """
        workload, card, e = self.workload, self.workload.card, self.workload.element_bytes
        of_head = workload.tokens * card.head_dim / workload.layout.tp * self.local
        queries, keys = of_head * card.heads, of_head * 2 * card.kv_heads
        forward = (24 + 5 * e) * queries + 6 * e * (queries + keys)
        backward = (16 + 5 * e) * (queries + keys) + 6 * e * (3 * queries + keys)
        return forward, backward

    def ring(self, link: float) -> float:
        """Return the exposed seconds of keys and values sent at `link` bytes per second."""
        workload, shape, e = self.workload, self.workload.attention, self.workload.element_bytes
        c, inner = workload.degrees.ring, max(shape.kv_heads, workload.degrees.ulysses)
        if c == 1:
            return 0.0
        keys: float = (c - 1) * 2 * inner * shape.slice_bytes * self.full
        times = 1.0
        if (stage := workload.degrees.heads_per_stage) is not None:  # once for each stage
            times = shape.heads // stage * min(stage, inner) / inner
            keys *= times
        full, sums = self.of_full(), max(4, e) / e
        exposed = max(0.0, keys / link - full.forward)
        exposed += max(0.0, keys * (1 + sums) / link - full.backward)
        exposed += max(0.0, self.again * (keys / link - full.repeated))
        if workload.window is not None and self.local:
            reached = 2 * min(workload.window - 1, workload.seq_length - self._chunk)
            of_head = 2 * shape.slice_bytes / shape.tokens
            of_token = of_head * inner / workload.degrees.ulysses  # heads after the all-to-all
            halo, local = reached * of_token * times * self.local / link, self.of_local()
            exposed += max(0.0, halo - local.forward) + max(0.0, halo - local.backward)
            exposed += halo * sums  # of the gradients, which the attention before has made
            exposed += max(0.0, self.again * (halo - local.repeated))
        return exposed

    @property
    def _peak(self) -> float:
        return self.cluster.gpu.bf16_tflops * TERA

    @property
    def _chunk(self) -> float:
        """Tokens of one of the two chunks of a ring rank's zigzag shard."""
        return self.workload.seq_length / self.workload.degrees.ring / 2

    def _products(self, layers: int, mean: float, peak: float) -> Seconds:
        workload, efficiency = self.workload, self.cluster.efficiency
        of_forward, of_backward = efficiency.attention_of(workload.card.head_dim)
        width = workload.card.heads * workload.card.head_dim / workload.layout.tp
        unit = width * workload.seq_length * workload.tokens * layers * mean
        forward = 2 * unit / (peak * of_forward)
        backward = 5 * unit / (peak * of_backward)
        return Seconds(forward, backward, self.again * forward)

    def _attended(self, window: int | None) -> Attended:
        workload, block = self.workload, self.cluster.efficiency.ring_block
        if workload.documents is None:
            if window is None:
                return WHOLE
            return in_window(window, seq_length=workload.seq_length, block=block)
        return workload.documents.attended(
            seq_length=workload.seq_length,
            ring=workload.degrees.ring,
            data_ranks=workload.layout.dp,
            sequences=workload.micro_batches * workload.layout.micro_batch,
            block=block,
            window=window,
        )
