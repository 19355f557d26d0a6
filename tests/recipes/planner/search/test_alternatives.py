# SPDX-License-Identifier: Apache-2.0
"""The longest context, and what is offered where nothing fits, agree with the search."""

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.models import CARDS
from recipes.notation.layout import layout_from, words_of
from recipes.planner.feasibility import violations
from recipes.planner.memory import memory
from recipes.planner.plan import host_cap
from recipes.planner.search import ranking
from recipes.planner.search.alternatives import (
    faster_batch,
    lacks,
    longest,
    max_length,
    why_not,
)
from recipes.planner.search.parallel_sizes import LARGEST_CLUSTER
from recipes.planner.search.ranking import fits, search
from recipes.planner.search.request import of_stage
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.layout import Fp8
from recipes.spec.units import GiB, K, M
from tests.recipes.planner.search.questions import H100, question

FULL = "full tile-loss tile-mlp"
LONG = [
    ("llama31_8b", "dgx_h100", f"tp2 ulysses4 {FULL} offload-inputs:143.1 adam-on-host:1", 3072),
    ("llama31_8b", "dgx_h100", f"tp2 hybrid1x4/1 {FULL} offload-inputs:144.1 adam-on-host:1", 4608),
    ("llama31_8b", "dgx_h100", f"head_chunked1 {FULL} offload-inputs:223.8 adam-on-host:1", 416),
    ("llama31_8b", "dgx_h100", f"tp2 head_chunked1 {FULL} offload-inputs:220 adam-on-host:1", 1152),
    (
        "qwen3_32b",
        "dgx_h100",
        f"tp8 head_chunked1 {FULL} offload-inputs:221.2 adam-on-host:1",
        2048,
    ),
    ("qwen3_14b", "dgx_h200", f"{FULL} adam-on-host:1", 88),
    ("llama3_70b", "dgx_h200", f"tp8 {FULL} offload-inputs:170 adam-on-host:1", 576),
    ("qwen3_4b", "dgx_h100", f"head_chunked1 {FULL} offload-inputs:222.8 adam-on-host:1", 960),
]
"""Lengths in K that once were called too long: Adam on the host with full recompute holds them."""


@pytest.mark.parametrize(("card", "machine", "words", "length"), LONG)
def test_what_words_can_say_is_within_the_longest_length(card, machine, words, length):
    layout = layout_from(words)
    asked = question(
        card=CARDS[card], cluster=cluster.load(machine), gpus=layout.world_size,
        seq_length=length * K, tokens_per_batch=max(4 * M // (length * K), 1) * length * K,
    )  # fmt: skip
    found = asked.plan(layout)
    assert found.fits
    assert not list(violations(found.workload, asked.cluster))
    assert search(asked).plans
    assert max_length(asked) >= length * K


def test_a_small_host_is_planned_up_to_the_longest_length():
    small = replace(cluster.load("dgx_h200"), host_memory_gib=64)
    asked = question(cluster=small, gpus=8)
    reached = max_length(asked)
    assert reached >= 1152 * K
    assert search(asked.at_length(reached)).plans
    longer = asked.at_length(2 * reached)
    assert f"these GPUs reach at least {reached:,} tokens" in why_not(longer, search(longer))
    one = question(card=CARDS["llama32_1b"], cluster=small, gpus=1)
    assert max_length(one) >= 248 * K


@pytest.mark.parametrize("gpus", [1, 8, 64])
@pytest.mark.parametrize("card", ["llama32_1b", "llama31_8b", "llama3_70b", "qwen3_30b_a3b"])
def test_the_longest_length_fits_and_an_eighth_more_does_not(card, gpus):
    asked = question(card=CARDS[card], gpus=gpus)
    reached = max_length(asked)
    eighth = 2 ** (reached.bit_length() - 1) // 8 if reached else K
    assert not search(asked.at_length(reached + eighth)).plans
    if reached:
        assert search(asked.at_length(reached)).plans


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_what_fits_a_length_fits_shorter_ones(gpus):
    asked = question(card=CARDS["qwen3_14b"], gpus=gpus)
    lengths = [2**n * eighths // 8 for n in range(10, 26) for eighths in range(8, 16)]
    there = [fits(asked.at_length(length)) for length in lengths]
    assert there == sorted(there, reverse=True)
    assert max_length(asked) == max(
        [0, *(n for n, held in zip(lengths, there, strict=True) if held)]
    )


def test_more_gpus_and_more_memory_reach_further():
    asked = question(card=CARDS["qwen3_14b"])
    by_gpus = [max_length(replace(asked, gpus=gpus)) for gpus in (1, 2, 4, 8, 16, 24, 32, 40, 64)]
    assert by_gpus == sorted(by_gpus)
    gpus = [replace(H100, gpu=replace(H100.gpu, memory_gib=size)) for size in (24, 40, 80, 141)]
    hosts = [replace(H100, host_memory_gib=size) for size in (64, 512, 2048)]
    for machines in (gpus, hosts):
        reached = [max_length(replace(asked, cluster=machine)) for machine in machines]
        assert reached == sorted(reached)
        assert reached[0] < reached[-1]


@pytest.mark.parametrize("gpus", [1, 2, 8, 64])
def test_a_part_of_a_node_has_that_part_of_its_host(gpus):
    asked = question(gpus=gpus)
    found = asked.plan(layout_from(f"dp{gpus} {FULL} offload-inputs:1 adam-on-host:1"))
    assert found.host_bytes == 256 * GiB  # an eighth of 2 TiB
    assert host_cap(asked.cluster) == pytest.approx(0.9 * 256)


def test_what_only_the_whole_host_of_a_node_holds_is_refused_on_one_gpu_of_it():
    words = f"head_chunked1 {FULL} offload-inputs:1000 adam-on-host:1"
    asked = question(gpus=1).at_length(448 * K)
    own = replace(asked, cluster=replace(H100, gpus_per_node=1))
    assert own.plan(layout_from(words)).fits
    alone = asked.plan(layout_from(words))
    assert alone.short <= 0 < alone.host_short
    assert "GiB of host memory a rank" in lacks(alone)
    assert not search(asked).plans
    assert search(own).plans


@pytest.mark.parametrize(
    ("card", "length", "gpus", "most"),
    [
        ("llama31_405b", 128 * K, 1024, 800),
        ("qwen3_30b_a3b", 128 * K, 1024, 100),
        ("llama3_70b", 16 * M, 16, 1500),
        ("llama31_405b", 64 * M, 1024, 6000),
    ],
)
def test_few_layouts_are_evaluated(monkeypatch, card, length, gpus, most):
    """Each takes some 0.06 ms: half a second of CPU for 1,024 GPUs, and one if nothing fits."""
    evaluated = []

    def counted(workload, kernels):
        evaluated.append(workload)
        return memory(workload, kernels)

    monkeypatch.setattr(ranking, "memory", counted)
    asked = question(card=CARDS[card], gpus=gpus).at_length(length)
    answer = ranking.search.__wrapped__(asked)
    if not answer.plans:
        why_not(asked, answer)
    assert len(evaluated) <= most


def test_a_longer_context_is_slower_also_between_powers_of_two():
    asked = question(gpus=64)
    lengths = [n * K for n in (8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128)]
    plans = [search(asked.at_length(length)).plans[0] for length in lengths]
    rates = [plan.time.tokens_per_gpu_second for plan in plans]
    assert rates == sorted(rates, reverse=True)


def test_a_batch_that_more_data_ranks_divide_is_offered_where_it_is_faster():
    asked = question(seq_length=12 * K, tokens_per_batch=341 * 12 * K, gpus=64)
    chosen = search(asked).plans[0]
    other = faster_batch(asked, search(asked))
    assert other.workload.tokens_per_batch == 320 * 12 * K
    assert other.time.tokens_per_gpu_second > 1.2 * chosen.time.tokens_per_gpu_second
    even = replace(asked, tokens_per_batch=320 * 12 * K)
    assert faster_batch(even, search(even)) is None


@pytest.mark.parametrize("most", [0, 1023, 1024, 1025, 1151, 1152, 5000, 100_000, 2**31, 2**32])
def test_the_longest_length_is_found_in_eighths_of_a_power_of_two(most):
    there = [K * 2**n * eighths // 8 for n in range(22) for eighths in range(8, 16)]
    expected = max((length for length in there if length <= min(most, 2**31)), default=0)
    assert longest(lambda length: length <= most) == expected


@pytest.mark.parametrize(
    ("card", "length", "gpus"),
    [("llama31_8b", 8 * M, 8), ("llama3_70b", 4 * M, 8), ("qwen3_32b", M, 2)],
)
def test_the_gpus_that_would_do_are_the_fewest(card, length, gpus):
    asked = question(card=CARDS[card], seq_length=length, tokens_per_batch=length, gpus=gpus)
    said = why_not(asked, search(asked))
    enough = next(n for n in (2 * gpus, 4 * gpus, 8 * gpus, 16 * gpus) if f"{n} GPUs" in said)
    assert search(replace(asked, gpus=enough)).plans
    assert not search(replace(asked, gpus=enough // 2)).plans


def test_where_nothing_fits_it_is_said_what_is_short_and_what_would_do():
    asked = question(seq_length=8 * M, tokens_per_batch=8 * M, gpus=8)
    answer = search(asked)
    assert not answer.plans
    said = why_not(asked, answer)
    assert "8,388,608 tokens fits 8 GPUs of dgx_h100; the nearest lacks" in said
    assert "16 GPUs would do" in said
    assert "these GPUs reach" in said


def test_where_no_sizes_divide_the_nearest_that_do_are_said():
    asked = question(seq_length=64 * K, gpus=24)
    said = why_not(asked, search(asked))
    assert "DP does not divide a batch of 64 sequences" in said
    assert "16 GPUs would do" in said
    assert "a batch of 63 sequences (4,128,768 tokens) would do" in said
    odd = question(seq_length=100_001, tokens_per_batch=100_001, gpus=8)
    assert "99,328 tokens would do" in why_not(odd, search(odd))


def test_more_gpus_than_any_cluster_has_are_never_offered():
    asked = question(card=CARDS["llama31_405b"], seq_length=512 * M, gpus=LARGEST_CLUSTER // 2,
                     tokens_per_batch=512 * M)  # fmt: skip
    said = why_not(asked, search(asked))
    assert said.startswith("no layout of llama31_405b")
    assert f"{2 * LARGEST_CLUSTER} GPUs" not in said


DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "planner.md").read_text()


def described(plan) -> str:
    """Return layout, tokens/s of a GPU and GiB of GPU and host as the cells of a table."""
    held = (plan.memory.total / GiB, plan.memory.host / GiB)
    rate = f"{plan.time.tokens_per_gpu_second:,.0f}"
    return f"`{words_of(plan.workload.layout)}` | {rate} | {held[0]:.1f} | {held[1]:.1f} |"


def with_save(plan) -> str:
    """Return `described` with the host GiB of a save, marked if that is more than there is."""
    saving = plan.memory.host + plan.gathered_to_save
    short = saving > plan.host_bytes
    assert short == any("may not be able to save" in warning for warning in plan.warnings)
    return f"{described(plan)} {saving / GiB:.1f}{'*' * short} |"


def test_the_page_says_what_one_gpu_holds_with_less_host_memory():
    for size in (64, 128, 256):
        alone = replace(H100, gpus_per_node=1, host_memory_gib=size)
        asked = question(cluster=alone, gpus=1, seq_length=64 * K)
        reached = max_length(asked)
        if not reached:
            assert f"| {size} GiB | none | {lacks(search(asked.at_length(K)).nearest)} |" in PAGE
            continue
        longest_plan = search(asked.at_length(reached)).plans[0]
        assert f"| {size} GiB | {reached // K}K | {with_save(longest_plan)}" in PAGE
        for batch, name in ((4 * M, "4M tokens"), (64 * K, "one sequence")):
            plan = search(replace(asked, tokens_per_batch=batch)).plans[0]
            assert f"| {size} GiB | 64K, {name} a step | {with_save(plan)}" in PAGE
        of_adam = plan.time.categories["optimizer"] / plan.time.step
        assert f"{of_adam:.0%} of one of 64K with {size} GiB" in PAGE or (
            f"{of_adam:.0%} with {size}." in PAGE
        )


def test_the_page_says_what_one_node_holds_of_five_million_tokens():
    for size, lengths in ((1024, (1024, 2048, 3072)), (2048, (1024, 2048, 3072, 4096, 5000))):
        asked = question(cluster=replace(H100, host_memory_gib=size), gpus=8)
        for length in lengths:
            one = replace(asked, seq_length=length * K, tokens_per_batch=length * K)
            plan = search(one).plans[0]
            assert f"| {size // 1024} TiB | {length:,}K | {described(plan)}" in PAGE
        longer = replace(asked, seq_length=5 * M, tokens_per_batch=5 * M)
        assert not search(longer).plans
    assert f"`plan --max-seq` says at least {max_length(asked) // K:,}K" in PAGE
    held = search(longer).nearest.memory.categories
    assert f"{held['gradients'] / GiB:.1f} GiB of gradients" in PAGE
    assert f"{held['attention'] / GiB:.1f} GiB of attention" in PAGE


@pytest.mark.parametrize("name", ["llama3_8b_nemo_16k", "llama3_8b_llama31_32k"])
def test_the_page_says_how_fast_a_recipe_is_with_and_without_context_parallelism(name):
    page = (DOCS / "context_parallelism.md").read_text()
    rates = []
    for row in (ROWS[name], ROWS[f"{name}_without_cp"]):
        gpus = row.layout.world_size
        asked = of_stage(row.card, row.stage, cluster.load(row.cluster), gpus=gpus, fp8=Fp8())
        plan = asked.plan(row.layout)
        assert plan.fits
        rates.append(plan.time.tokens_per_gpu_second)
        assert f"{rates[-1]:,.0f}" in page
    assert rates[0] > rates[1]
