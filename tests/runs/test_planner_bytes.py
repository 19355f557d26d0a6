# SPDX-License-Identifier: Apache-2.0
"""The planner's activation bytes are those of a step of the real recipe, within 5%.

Some of the steps of `benchmarks.planner_memory`, which has them all and a second model.
"""

import pytest

from benchmarks.planner_cases import (
    BOTH,
    Case,
    Found,
    four_ranks,
    fullest,
    measured,
    one_rank,
    predicted,
    two_ranks,
)
from benchmarks.planner_memory import BOUND
from custom_modules.memory.config import Recompute
from recipes.spec.layout import Layout
from tests.ranks import Ranks
from tests.runs.conftest import NEMO, TIMEOUT_SECONDS

pytestmark = pytest.mark.slow

TOKENS = 1024
MEASURED = {
    1: (
        "full; loss, mlp tiled",
        "selective mlp",
        "kept attention; loss, mlp tiled; both away; a head at a time",
    ),
    2: (
        "ulysses 2; kept; tiled",
        "head-chunked 2; full; tiled",
        "TP 2; none; loss tiled",
        "PP 2 x 2; none",
    ),
}
FURTHER = {
    1: ("none", "uniform 2", "block 2"),
    2: ("TP 2; full; tiled", "PP 2; none"),
    4: ("hybrid 2 x 2, 2 heads; kept; tiled; away", "ring 4; kept; tiled"),
}
NORMED = ("ulysses 2; none; loss tiled", "ring 2; none; loss tiled")
WINDOWED = ("full every 2, none",)
MAKERS = {1: one_rank, 2: two_ranks, 4: four_ranks}


def far(cases: list[Case], found: list[Found]) -> list[str]:
    """Return what is further off than the bound."""
    ratios = {
        case.name: predicted(case).activations / held.activations
        for case, held in zip(cases, found, strict=True)
    }
    return [f"{name}: {off:.3f}" for name, off in ratios.items() if abs(off - 1) > BOUND]


@pytest.mark.parametrize(
    ("size", "names"),
    [
        *MEASURED.items(),
        *(pytest.param(*of, marks=pytest.mark.nightly) for of in FURTHER.items()),
    ],
)
def test_predicted_bytes_are_those_of_a_step(size, names):
    made = {case.name: case for case in MAKERS[size]("tiny", TOKENS)}
    cases = [made[name] for name in names]
    with Ranks(measured, size, cases, server=NEMO) as ranks:
        assert far(cases, fullest(ranks.results(TIMEOUT_SECONDS))) == []


@pytest.mark.nightly
def test_predicted_bytes_of_a_model_with_norms_on_queries_and_keys_are_those_of_a_step():
    made = {case.name: case for case in two_ranks("qwen3_8b_sixteenth", TOKENS)}
    cases = [made[name] for name in NORMED]
    with Ranks(measured, 2, cases, server=NEMO) as ranks:
        assert far(cases, fullest(ranks.results(TIMEOUT_SECONDS))) == []


def test_predicted_bytes_of_a_model_with_gelu_and_windows_are_those_of_a_step():
    made = {case.name: case for case in one_rank("gemma3_1b_sixteenth", TOKENS)}
    cases = [made[name] for name in WINDOWED]
    with Ranks(measured, 1, cases, server=NEMO) as ranks:
        assert far(cases, fullest(ranks.results(TIMEOUT_SECONDS))) == []


def test_a_wrong_prediction_is_noticed():
    layout = Layout(precision="fp32", device="cpu", recompute=Recompute(kind="full"), tiling=BOTH)
    case = Case(name="full", card="tiny", layout=layout, tokens=TOKENS)
    size = round(predicted(case).activations / 1.06)
    held = Found(categories={"mlp": size, "weights": 10**9}, peak_bytes=size, peak_in="mlp")
    assert far([case], [held]) == ["full: 1.060"]
