# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from custom_modules.context_parallel.config import (
    KINDS,
    ContextParallelKind,
    Degrees,
    degrees,
    fits_ulysses,
    stage_sizes,
    ulysses_sizes,
)


def worked_out(
    kind: ContextParallelKind,
    size: int,
    heads: tuple[int, int] = (32, 8),
    *,
    seq_length: int = 8192,
    ranks_per_link: int = 8,
    head_dim: int = 128,
) -> Degrees:
    return degrees(
        kind,
        size=size,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        seq_length=seq_length,
        ranks_per_link=ranks_per_link,
    )


def sizes(found: Degrees) -> tuple[str, int, int, int | None]:
    return found.kind, found.ulysses, found.ring, found.heads_per_stage


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        (8, 8, [1, 2, 4, 8]),
        (8, 2, [1, 2, 4, 8]),
        (6, 2, [1, 2, 6]),  # 3 ranks have 2 heads each, but the first would need both KV heads
        (4, 1, [1, 2, 4]),
        (7, 7, [1, 7]),
        (12, 4, [1, 2, 4, 12]),
    ],
)
def test_all_to_all_degrees_give_whole_kv_heads(heads, kv_heads, expected):
    assert ulysses_sizes(heads, kv_heads) == expected
    assert [n for n in range(1, 2 * heads) if fits_ulysses(heads, kv_heads, n)] == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses", "expected"),
    [
        (8, 8, 1, [1, 2, 4, 8]),
        (8, 2, 1, [1, 2, 4, 8]),
        (8, 2, 2, [2, 4, 8]),
        (8, 2, 4, [4, 8]),
        (8, 2, 8, [8]),
        (6, 2, 1, [1, 2, 6]),  # 4 of 6 is not a whole number of stages
        (6, 2, 2, [2, 6]),
        (6, 6, 1, [1, 2, 3, 6]),
        (4, 1, 1, [1, 2, 4]),
        (32, 8, 4, [4, 8, 16, 32]),
    ],
)
def test_stages_take_whole_groups(heads, kv_heads, ulysses, expected):
    assert stage_sizes(heads, kv_heads, ulysses) == expected


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        (ContextParallelKind(kind="ring"), 8, ("ring", 1, 8, None)),
        (ContextParallelKind(kind="ring"), 7, ("ring", 1, 7, None)),
        (ContextParallelKind(kind="ulysses"), 8, ("ulysses", 8, 1, None)),
        (ContextParallelKind(kind="ulysses"), 32, ("ulysses", 32, 1, None)),
        (ContextParallelKind(kind="ulysses"), 1, ("ulysses", 1, 1, None)),
        (ContextParallelKind(kind="head_chunked"), 4, ("head_chunked", 4, 1, 4)),
        (
            ContextParallelKind(kind="head_chunked", heads_per_stage=16),
            4,
            ("head_chunked", 4, 1, 16),
        ),
        (ContextParallelKind(kind="hybrid", ulysses=4), 16, ("hybrid", 4, 4, None)),
        (ContextParallelKind(kind="hybrid", ulysses=8), 8, ("hybrid", 8, 1, None)),
        (
            ContextParallelKind(kind="hybrid", ulysses=4, heads_per_stage=8),
            16,
            ("hybrid", 4, 4, 8),
        ),
        (ContextParallelKind(kind="p2p"), 16, ("p2p", 1, 16, None)),
        (ContextParallelKind(kind="all_gather"), 16, ("all_gather", 1, 16, None)),
        (ContextParallelKind(kind="a2a"), 8, ("a2a", 8, 1, None)),
        (ContextParallelKind(kind="a2a+p2p", ulysses=4), 16, ("a2a+p2p", 4, 4, None)),
    ],
    ids=str,
)
def test_a_kind_that_is_asked_for_is_worked_out(kind, size, expected):
    found = worked_out(kind, size)
    assert sizes(found) == expected
    assert found.reason == "as asked for"


# q, k and v of 32/8 heads of 128 are 48 * 128 * 2 bytes = 12 KiB a token, 24 KiB with their
# exchanged copies: 2 GiB are 85.3 Ki tokens a rank.
CHOICES = {
    "one rank": (1, (32, 8), {}, ("ring", 1, 1, None)),
    "one node, short": (8, (32, 8), {}, ("ulysses", 8, 1, None)),
    "one node, just short enough": (
        8, (32, 8), {"seq_length": 8 * 85 * 1024}, ("ulysses", 8, 1, None),
    ),
    "one node, just too long": (
        8, (32, 8), {"seq_length": 8 * 86 * 1024}, ("head_chunked", 8, 1, 8),
    ),
    "heads of one stage are not chunked": (
        8, (8, 8), {"seq_length": 8 * 1024 * 1024}, ("ulysses", 8, 1, None),
    ),
    "two nodes": (16, (32, 8), {}, ("hybrid", 8, 2, None)),
    "two nodes, long": (16, (32, 8), {"seq_length": 4 * 1024**2}, ("hybrid", 8, 2, 8)),
    "a link of 4": (8, (32, 8), {"ranks_per_link": 4}, ("hybrid", 4, 2, None)),
    "a link of 1": (8, (32, 8), {"ranks_per_link": 1}, ("ring", 1, 8, None)),
    "five ranks": (5, (32, 8), {"ranks_per_link": 5}, ("ring", 1, 5, None)),
    "six ranks": (6, (32, 8), {"ranks_per_link": 6}, ("hybrid", 2, 3, None)),
    "fewer KV heads than ranks": (8, (8, 2), {}, ("ulysses", 8, 1, None)),
    "a prime number of heads": (8, (7, 7), {}, ("ring", 1, 8, None)),
    "1,024 ranks": (1024, (32, 8), {"seq_length": 1024**2}, ("hybrid", 8, 128, None)),
    "1,024 ranks, long": (1024, (32, 8), {"seq_length": 128 * 1024**2}, ("hybrid", 8, 128, 8)),
}  # fmt: skip


@pytest.mark.parametrize(("size", "heads", "other", "expected"), CHOICES.values(), ids=CHOICES)
def test_auto_chooses_by_heads_ranks_links_and_length(size, heads, other, expected):
    assert sizes(worked_out(ContextParallelKind(), size, heads, **other)) == expected


@pytest.mark.parametrize(
    ("size", "other", "words"),
    [
        (1, {}, "one rank holds the whole sequence"),
        (8, {}, "32/8 heads and 8 ranks on the fast link allow an all-to-all of all 8"),
        (16, {}, "allow an all-to-all of 8, so a ring of 2 goes round it"),
        (5, {}, "allow no all-to-all, so keys and values go round a ring"),
        (8, {"seq_length": 2**20}, "at 1,048,576 tokens .* 3.0 GiB in bf16, so 8 heads go"),
    ],
)
def test_auto_says_why(size, other, words):
    assert re.search(words, worked_out(ContextParallelKind(), size, **other).reason)


def test_degrees_print_what_was_chosen():
    chosen = worked_out(ContextParallelKind(kind="hybrid", ulysses=4, heads_per_stage=8), 16)
    assert str(chosen) == "hybrid (all-to-all 4 x ring 4, 8 heads a stage): as asked for"
    chosen = worked_out(ContextParallelKind(kind="ring"), 16)
    assert str(chosen) == "ring (all-to-all 1 x ring 16): as asked for"


@pytest.mark.parametrize(
    ("kind", "size", "heads", "words"),
    [
        (
            ContextParallelKind(kind="ulysses"), 16, (24, 8),
            r"CP 16 as ulysses does not fit 24 heads and 8 KV heads on each TP rank: an all-to-all "
            r"of 16 .* may be 1, 2, 4, 8 or 24\. For CP 16 take ring, or hybrid with ulysses "
            r"1, 2, 4 or 8 inside",
        ),
        (
            ContextParallelKind(kind="ulysses"), 5, (32, 8),
            r"may be 1, 2, 4, 8, 16 or 32\. For CP 5 take ring$",
        ),
        (ContextParallelKind(kind="ulysses"), 3, (6, 2), r"may be 1, 2 or 6\. For CP 3 take ring$"),
        (ContextParallelKind(kind="head_chunked"), 64, (32, 8), "CP 64 as head_chunked"),
        (
            ContextParallelKind(kind="hybrid", ulysses=64), 128, (32, 8),
            "an all-to-all of 64 cannot share them",
        ),
        (
            ContextParallelKind(kind="hybrid", ulysses=8), 12, (32, 8),
            "ulysses 8 does not divide CP 12; it may be 1, 2 or 4$",
        ),
        # Transformer Engine does not send a KV head to several ranks.
        (ContextParallelKind(kind="a2a"), 16, (32, 8), r"CP 16 as a2a .* ulysses 1, 2, 4 or 8 ins"),
        (
            ContextParallelKind(kind="a2a+p2p", ulysses=4), 8, (8, 2),
            r"CP 8 as a2a\+p2p .* ulysses 1 or 2 inside",
        ),
        (
            ContextParallelKind(kind="head_chunked", heads_per_stage=6), 4, (32, 8),
            "heads_per_stage 6 is not possible with 32 heads and 8 KV heads over 4 .*: it is a "
            "multiple of 4 that takes whole groups; it may be 4, 8, 16 or 32",
        ),
        (
            ContextParallelKind(kind="hybrid", ulysses=8, heads_per_stage=4), 16, (32, 8),
            "heads_per_stage 4 is not possible .* it may be 8, 16 or 32",
        ),
        (
            ContextParallelKind(kind="head_chunked", heads_per_stage=64), 32, (32, 8),
            "it may be 32 only",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_kind_that_does_not_fit_is_refused_with_what_does(kind, size, heads, words):
    with pytest.raises(ValueError, match=words):
        worked_out(kind, size, heads)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "rings"}, f"kind 'rings' is unknown; choose {', '.join(KINDS)}"),
        ({"kind": "hybrid"}, "hybrid needs ulysses"),
        ({"kind": "a2a+p2p"}, "a2a+p2p needs ulysses"),
        ({"kind": "ring", "ulysses": 2}, "ulysses is 2, which has no effect .* kind ring"),
        ({"ulysses": 2}, "no effect on context parallel kind auto; .* hybrid or a2a+p2p"),
        ({"kind": "ulysses", "heads_per_stage": 8}, "heads_per_stage is 8, .* kind ulysses"),
        ({"kind": "a2a+p2p", "ulysses": 2, "heads_per_stage": 8}, "heads_per_stage is 8"),
        ({"heads_per_stage": 8}, "leave it out, or choose head_chunked or hybrid"),
        ({"kind": "hybrid", "ulysses": 0}, "ulysses is 0; it must be at least 1"),
        ({"kind": "head_chunked", "heads_per_stage": 0}, "heads_per_stage is 0; it must be at le"),
    ],
    ids=str,
)
def test_numbers_that_a_kind_does_not_use_or_needs_are_refused(fields, words):
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        ContextParallelKind(**fields)
