# SPDX-License-Identifier: Apache-2.0
"""The small extension of a probe: a stage with few tokens, from real weights, on one machine.

It keeps what decides whether the weights follow: length, rotation, positions, documents and the
shape and peak of the schedule. Only the tokens are few, in all and of a step.
"""

from collections.abc import Sequence
from dataclasses import replace

from recipes.spec.gate import Gate
from recipes.spec.stage import Ladder, Stage

GPU_TOKENS, CPU_TOKENS = 4_000_000, 32 * 1024
"""Budget where none is given: a few minutes of one node, or of two CPU cores on a small model."""
GPU_STEPS, CPU_STEPS = 32, 8
"""Optimizer steps that a budget is shared by, where each then has at least a sequence."""
MOST_ON_CPU = 32 * 1024
"""Tokens of a sequence beyond which CPU ranks take hours."""


def probe_ladder(
    ladder: Ladder, stage: Stage, *, length: int, tokens: int, steps: int, gpus: int = 1
) -> Ladder:
    """Return a ladder of the stage's small extension, which starts from the card's weights.

    `tokens` are shared by `steps` optimizer steps, of as many sequences as `gpus` can share, and at
    most the stage's own. Sequences longer than `length` are cut to it; a mix then is left out, as
    its steps have lengths of their own. Raises ValueError for less than a sequence.
    """
    cut = stage.seq_length > length
    seq_length = min(stage.seq_length, length)
    if tokens < seq_length:
        raise ValueError(
            f"--tokens is {tokens:,}, and a sequence of the probe has {seq_length:,}; name at "
            "least that, or a shorter --length"
        )
    sequences = max(1, min(tokens // steps, stage.tokens_per_batch) // seq_length)
    if sequences < gpus:
        sequences = 2 ** (sequences.bit_length() - 1)
    batch = sequences // min(gpus, sequences) * min(gpus, sequences) * seq_length
    small = replace(
        stage,
        seq_length=seq_length,
        tokens=tokens,
        tokens_per_batch=batch,
        mix=None if cut else stage.mix,
        recovers=None if cut else stage.recovers,
        start="card",
        optimizer="new",
        gate=Gate(),
    )
    return replace(ladder, name=f"{ladder.name}_probe", stages=(small,), suites=(), path="")


def range_ends(native: int, length: int, bucket: int) -> list[int]:
    """Return the ends of the ranges of positions that a probe shows, in whole buckets.

    Quarters of the native context in halves, then its doublings, up to `length`.
    """
    ends = [native // 4, native // 2, native]
    while 2 * ends[-1] < length:
        ends.append(2 * ends[-1])
    inner = {max(bucket, round(end / bucket) * bucket) for end in ends}
    return sorted({end for end in inner if end < length} | {length})


def slope(tokens: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """Return the slope of losses per token by least squares, and its standard error.

    Both are NaN for fewer than three points.
    """
    number = len(losses)
    if number < 3:
        return float("nan"), float("nan")
    mean_x, mean_y = sum(tokens) / number, sum(losses) / number
    spread = sum((x - mean_x) ** 2 for x in tokens)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in zip(tokens, losses, strict=True)) / spread
    residual = sum(
        (y - mean_y - rise * (x - mean_x)) ** 2 for x, y in zip(tokens, losses, strict=True)
    )
    return rise, (residual / (number - 2) / spread) ** 0.5
