# SPDX-License-Identifier: Apache-2.0
"""No random layout beats what the search chooses, and none fits where it finds nothing."""

from itertools import islice
from random import Random

import pytest

from recipes.models import CARDS
from recipes.notation.layout import words_of
from recipes.planner.batch_size import even_batch
from recipes.planner.search.alternatives import max_length
from recipes.planner.search.ranking import TOLERANCE, search
from recipes.spec import cluster
from recipes.spec.units import K, M
from tests.recipes.planner.search.questions import question
from tests.recipes.planner.search.random_layouts import random_plans

DENSE = [
    ("llama31_8b", 8 * K, 64, "dgx_h100"),
    ("llama31_8b", 64 * K, 8, "dgx_h100"),
    ("llama31_8b", 512 * K, 8, "dgx_h100"),
    ("llama31_8b", M, 64, "dgx_h100"),
    ("llama31_8b", 2 * M, 8, "dgx_h200"),
    ("qwen25_7b", 32 * K, 24, "dgx_h100"),
    ("qwen3_14b", 256 * K, 8, "dgx_a100"),
    ("qwen3_32b", M, 16, "dgx_h100"),
    ("llama3_70b", 8 * K, 32, "dgx_h200"),
    ("llama3_70b", 128 * K, 64, "dgx_h100"),
    ("llama3_70b", 2 * M, 64, "dgx_h100"),
    ("llama31_405b", 128 * K, 1024, "dgx_h100"),
]
EXPERTS = [
    ("mixtral_8x7b", 32 * K, 16, "dgx_h200"),
    ("mixtral_8x7b", 64 * K, 64, "dgx_h100"),
    ("qwen3_30b_a3b", 32 * K, 32, "dgx_h100"),
    ("qwen3_30b_a3b", 128 * K, 64, "gb200_nvl72"),
]
ONE_GPU = [
    ("llama32_1b", 64 * K, 1, "dgx_h100"),
    ("qwen3_4b", 32 * K, 1, "dgx_h100"),
    ("llama31_8b", 128 * K, 1, "dgx_h200"),
    ("qwen3_14b", 32 * K, 1, "dgx_h200"),
]
CASES = DENSE + EXPERTS + ONE_GPU
FEW = {DENSE[1], DENSE[3], DENSE[5], DENSE[6], DENSE[9], EXPERTS[1], EXPERTS[2], ONE_GPU[0]}
"""They include one GPU, many nodes, numbers of nodes that are not powers of two, and experts."""
LAYOUTS, DRAWS = 60, 20_000
LOSES = 0.02


def cases(of: list[tuple[str, int, int, str]]) -> list:
    """Return cases as parameters; those that are not among the few run nightly."""
    return [
        pytest.param(
            case, id=f"{case[0]} {case[1] // K}K x{case[2]}",
            marks=() if case in FEW else pytest.mark.nightly,
        )
        for case in of
    ]  # fmt: skip


def asked_of(card: str, length: int, gpus: int, machine: str):
    return question(
        card=CARDS[card], seq_length=length, tokens_per_batch=even_batch(4 * M, length, gpus),
        cluster=cluster.load(machine), gpus=gpus,
    )  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_the_search_never_loses_by_two_percent_to_a_random_layout(case):
    asked = asked_of(*case)
    found = min(plan.time.step for plan in search(asked).plans)
    plans = [*islice(random_plans(asked, Random(19), DRAWS), LAYOUTS)]
    assert len(plans) == LAYOUTS
    fastest = min(plans, key=lambda plan: plan.time.step)
    assert found <= (1 + LOSES) * fastest.time.step, words_of(fastest.workload.layout)


@pytest.mark.parametrize("case", cases(DENSE))
def test_no_random_layout_is_a_fifth_leaner_at_the_time_of_the_fastest(case):
    asked = asked_of(*case)
    chosen, fastest = search(asked).automatic, search(asked, tightest=True).automatic
    for plan in islice(random_plans(asked, Random(20), DRAWS), LAYOUTS):
        if plan.time.step <= (1 + TOLERANCE) * fastest.time.step and not plan.untried:
            more_host = plan.memory.host > fastest.memory.host
            assert plan.memory.total > 0.8 * chosen.memory.total or more_host


@pytest.mark.parametrize("case", cases([DENSE[1], DENSE[9], *EXPERTS[:2], *ONE_GPU[:2]]))
def test_no_random_layout_fits_beyond_the_longest_length(case):
    asked = asked_of(*case)
    longer = asked.at_length(2 * max_length(asked))
    assert [*random_plans(longer, Random(19), 500)] == []


def test_a_random_layout_beats_a_search_that_leaves_something_out(monkeypatch):
    from recipes.planner.search import ranking

    monkeypatch.setattr(ranking, "UNTRIED", ())
    asked = asked_of("llama3_70b", 2 * M, 64, "dgx_h100")
    found = min(plan.time.step for plan in ranking.search.__wrapped__(asked).plans)
    plans = islice(random_plans(asked, Random(19), DRAWS), LAYOUTS)
    assert found > (1 + LOSES) * min(plan.time.step for plan in plans)
