# SPDX-License-Identifier: Apache-2.0
"""Kinds of context parallelism: their configuration, and the choice that `auto` makes.

Does not import torch: recipes and the planner build it, `custom_modules.context_parallel.attend`
and `custom_modules.context_parallel.head_chunked` implement it.

| kind | inside, all-to-all | outside, ring | needs |
| --- | --- | --- | --- |
| `ring` | 1 | CP | nothing of the heads |
| `ulysses` | CP | 1 | CP divides the heads, and CP divides the KV heads or they divide CP |
| `head_chunked` | CP | 1 | the same, and stages of whole groups of heads |
| `hybrid` | u | CP / u | the same of u; head-chunked inside if `heads_per_stage` is set |
| `p2p`, `a2a`, `all_gather`, `a2a+p2p` | | | Transformer Engine's own, on its GPUs |

"Heads" are those of one tensor parallel rank throughout.
"""

from dataclasses import dataclass
from typing import Literal, Optional, get_args

Kind = Literal[
    "auto", "ring", "ulysses", "head_chunked", "hybrid", "p2p", "a2a", "all_gather", "a2a+p2p"
]
KINDS: tuple[str, ...] = get_args(Kind)
TRANSFORMER_ENGINE_KINDS = ("p2p", "a2a", "all_gather", "a2a+p2p")
_TWO_LEVELS = ("hybrid", "a2a+p2p")

HEAD_CHUNK_FROM_GIB = 2.0
"""`auto` chunks the heads if Ulysses' q, k, v before and after the exchange would take more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallelKind:
    """A kind of context parallelism; its size is that of the group it runs in."""

    kind: Kind = "auto"
    # Optional[...] here: nemo-run 0.11.1 cannot parse an override of a field annotated `X | None`.
    ulysses: Optional[int] = None  # noqa: UP045
    """Ranks of the inner all-to-all, for the kinds of two levels; the ring has CP / ulysses."""
    heads_per_stage: Optional[int] = None  # noqa: UP045
    """Query heads attended with at a time (U of arXiv 2602.21196), for `head_chunked` (None: the
    fewest) and `hybrid` (None: all at once)."""

    def __post_init__(self) -> None:
        """Refuse unknown kinds, and numbers that the kind does not use or that are missing."""
        if self.kind not in KINDS:
            raise ValueError(
                f"context parallel kind {self.kind!r} is unknown; choose {', '.join(KINDS)}"
            )
        if self.ulysses is None and self.kind in _TWO_LEVELS:
            raise ValueError(f"context parallel kind {self.kind} needs ulysses, its inner degree")
        if self.ulysses is not None and self.kind not in _TWO_LEVELS:
            raise ValueError(
                f"ulysses is {self.ulysses}, which has no effect on context parallel kind "
                f"{self.kind}; leave it out, or choose {' or '.join(_TWO_LEVELS)}"
            )
        if self.heads_per_stage is not None and self.kind not in ("head_chunked", "hybrid"):
            raise ValueError(
                f"heads_per_stage is {self.heads_per_stage}, which has no effect on context "
                f"parallel kind {self.kind}; leave it out, or choose head_chunked or hybrid"
            )
        for name in ("ulysses", "heads_per_stage"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    @property
    def may_chunk_heads(self) -> bool:
        """Whether attention may take a few heads at a time; `auto` decides when ranks are known."""
        return self.kind in ("auto", "head_chunked") or self.heads_per_stage is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """A kind resolved for a model and a number of ranks."""

    kind: Kind
    """Never `auto`."""
    ulysses: int
    ring: int
    heads_per_stage: int | None
    """None: all heads at once."""
    reason: str
    """Why `auto` chose it, or that it was requested."""

    def __str__(self) -> str:
        sizes = f"all-to-all {self.ulysses} x ring {self.ring}"
        heads = "1 head" if self.heads_per_stage == 1 else f"{self.heads_per_stage} heads"
        stages = f", {heads} a stage" if self.heads_per_stage else ""
        return f"{self.kind} ({sizes}{stages}): {self.reason}"


def fits_ulysses(heads: int, kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks gets query heads with whole KV heads of their own."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def ulysses_sizes(heads: int, kv_heads: int) -> list[int]:
    """Return the all-to-all degrees that these heads allow."""
    return [size for size in range(1, heads + 1) if fits_ulysses(heads, kv_heads, size)]


def stage_sizes(heads: int, kv_heads: int, ulysses: int) -> list[int]:
    """Return the numbers of query heads that a stage of head-chunked Ulysses may have.

    A stage takes the same number of query heads on each rank, for KV heads that are exchanged once:
    a divisor of the KV heads (each at least once a rank) or a multiple of them.
    """
    virtual = max(kv_heads, ulysses)  # KV heads after replication
    return [
        size
        for size in range(ulysses, heads + 1, ulysses)
        if virtual % size == 0 or (size % virtual == 0 and heads % size == 0)
    ]


def degrees(
    cp: ContextParallelKind,
    *,
    size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_length: int,
    ranks_per_link: int,
    chunks: bool = True,
) -> Degrees:
    """Resolve a kind for `size` ranks; raise ValueError, with possible values, if it does not fit.

    `heads` and `kv_heads` are those of a tensor parallel rank, `ranks_per_link` the neighbouring
    context ranks that share the fast link (NVLink): `auto` keeps the all-to-all inside it. Without
    `chunks` a model cannot project a few heads at a time, since it normalises all of them at once.
    """
    if cp.kind == "auto":
        return _chosen(size, heads, kv_heads, head_dim, seq_length, ranks_per_link, chunks)
    if not chunks and (cp.kind == "head_chunked" or cp.heads_per_stage is not None):
        raise ValueError(
            f"context parallel kind {cp.kind} projects a few heads at a time, and this model "
            "normalises queries and keys over all heads of a token; take ulysses, ring, or hybrid "
            "without heads_per_stage"
        )
    if cp.ulysses is not None and size % cp.ulysses:
        divisors = [n for n in ulysses_sizes(heads, kv_heads) if size % n == 0]
        raise ValueError(
            f"ulysses {cp.ulysses} does not divide CP {size}; it may be {_words(divisors)}"
        )
    ulysses = {"ring": 1, "p2p": 1, "all_gather": 1}.get(cp.kind, cp.ulysses or size)
    _require_ulysses(cp.kind, ulysses, heads, kv_heads, size)
    return Degrees(
        kind=cp.kind,
        ulysses=ulysses,
        ring=size // ulysses,
        heads_per_stage=_heads_per_stage(cp, heads, kv_heads, ulysses),
        reason="as asked for",
    )


def _require_ulysses(kind: str, ulysses: int, heads: int, kv_heads: int, size: int) -> None:
    by_transformer_engine = kind in TRANSFORMER_ENGINE_KINDS
    if fits_ulysses(heads, kv_heads, ulysses) and not (
        by_transformer_engine and kv_heads % ulysses
    ):
        return
    possible = [
        n
        for n in ulysses_sizes(heads, kv_heads)
        if size % n == 0 and not (by_transformer_engine and kv_heads % n)
    ]
    outer = f"hybrid with ulysses {_words(possible)} inside" if possible[1:] else ""
    raise ValueError(
        f"CP {size} as {kind} does not fit {heads} heads and {kv_heads} KV heads on each TP rank: "
        f"an all-to-all of {ulysses} cannot share them; its degree may be "
        f"{_words(ulysses_sizes(heads, kv_heads))}. For CP {size} take ring"
        + (f", or {outer}" if outer else "")
    )


def _heads_per_stage(
    cp: ContextParallelKind, heads: int, kv_heads: int, ulysses: int
) -> int | None:
    possible = stage_sizes(heads, kv_heads, ulysses)
    if cp.heads_per_stage is None:
        return possible[0] if cp.kind == "head_chunked" else None
    require_stage(cp.heads_per_stage, heads, kv_heads, ulysses)
    return cp.heads_per_stage


def require_stage(heads_per_stage: int, heads: int, kv_heads: int, ulysses: int) -> None:
    """Raise ValueError, with possible values, if a stage cannot have this number of query heads."""
    possible = stage_sizes(heads, kv_heads, ulysses)
    if heads_per_stage not in possible:
        raise ValueError(
            f"heads_per_stage {heads_per_stage} is not possible with {heads} heads and "
            f"{kv_heads} KV heads over {ulysses} all-to-all ranks: it is a multiple of {ulysses} "
            f"that takes whole groups; it may be {_words(possible)}"
        )


def _chosen(
    size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_length: int,
    ranks_per_link: int,
    chunks: bool,
) -> Degrees:
    """Choose by heads, ranks, links and length; give the reason."""
    inside = [
        n for n in ulysses_sizes(heads, kv_heads) if size % n == 0 and ranks_per_link % n == 0
    ]
    ulysses = max(inside, default=1)
    ring = size // ulysses
    because = [f"{heads}/{kv_heads} heads and {ranks_per_link} ranks on the fast link"]
    if size == 1:
        because = ["one rank holds the whole sequence"]
    elif ulysses == 1:
        because.append("allow no all-to-all, so keys and values go round a ring")
    elif ring == 1:
        because.append(f"allow an all-to-all of all {size}, the fewest bytes")
    else:
        because.append(f"allow an all-to-all of {ulysses}, so a ring of {ring} goes round it")
    buffers = 2 * (heads + 2 * kv_heads) * head_dim * (seq_length / size) * 2 / 2**30
    stages = stage_sizes(heads, kv_heads, ulysses)
    chunked = chunks and ulysses > 1 and buffers > HEAD_CHUNK_FROM_GIB and stages[0] < heads
    if chunked:
        because.append(
            f"; at {seq_length:,} tokens q, k and v before and after it would take "
            f"{buffers:.1f} GiB in bf16, so {stages[0]} heads go at a time"
        )
    kind: Kind = (
        "ring" if ulysses == 1 else "hybrid" if ring > 1
        else "head_chunked" if chunked else "ulysses"
    )  # fmt: skip
    return Degrees(
        kind=kind,
        ulysses=ulysses,
        ring=ring,
        heads_per_stage=stages[0] if chunked else None,
        reason=" ".join(because).replace(" ;", ";"),
    )


def _words(numbers: list[int]) -> str:
    """Return numbers as words for a message."""
    words = [str(number) for number in numbers]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else f"{words[0]} only"
