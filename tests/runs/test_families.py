# SPDX-License-Identifier: Apache-2.0
"""A stage of a model with experts, of one with LayerNorm and of one with windows and norms after
attention and MLP trains alike under each layout."""

from pathlib import Path

import pytest

from tests.runs.conftest import TrainingRun

pytestmark = pytest.mark.slow

CARDS = {
    "mixtral": {"family": "mixtral", "experts": 4, "experts_per_token": 2},
    "nemotron": {"family": "nemotron"},
    "olmo3": {
        "family": "olmo3",
        "pattern": {"every": 2, "window": 48, "local_rope": {"method": "default", "base": 10_000}},
    },
}
KEPT = {"recompute": {"kind": "kept_attention"}}
LAYOUTS = {"context ranks, attention kept": {"cp": 2, **KEPT}}
OF_EXPERTS = {
    "experts over data ranks": {"dp": 2, "ep": 2},
    "whole experts over tensor ranks": {"tp": 2, "ep": 2, "etp": 1, **KEPT},
}
STEPS = 7
"""One checkpoint, of step 5, and a moment behind it at which a run is killed."""
FURTHER = {"tensor ranks": {"tp": 2}, "data ranks": {"dp": 2}, "pipeline": {"pp": 2}}


@pytest.fixture(
    scope="module",
    params=[
        "mixtral",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("nemotron", "olmo3")),
    ],
)
def started(request, tmp_path_factory, small_store) -> tuple[str, str, list[dict]]:
    """Return family, checkpoints of two steps on one rank, and the steps from there on one."""

    def run(name: str, **options: object) -> TrainingRun:
        made = TrainingRun(
            tmp_path_factory.mktemp(name), small_store, layout={}, card=CARDS[request.param],
            ranks=1, **options,
        )  # fmt: skip
        made.finish()
        return made

    start = run("start", steps=2).metrics.parent / "checkpoints"
    return request.param, str(start), run("alone", steps=STEPS, start=str(start)).steps()


def require_same(started, layouts: dict[str, dict], store: Path, folder: Path) -> None:
    """Train under each layout and assert the losses of one rank at each step."""
    family, start, alone = started
    assert alone[-1]["loss"] < alone[0]["loss"]
    for name, layout in layouts.items():
        run = TrainingRun(
            folder / name,
            store,
            layout=layout,
            card=CARDS[family],
            ranks=2,
            steps=STEPS,
            start=start,
        )
        steps = run.finish()
        assert len(steps) == STEPS
        for ours, reference in zip(steps, alone, strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), (name, ours["step"])


@pytest.mark.nightly  # test_expert_parallel has the gradients, test_families_ranks other families
def test_two_ranks_give_the_losses_of_one_at_each_step(started, small_store, tmp_path: Path):
    with_experts = started[0] == "mixtral"
    require_same(started, OF_EXPERTS if with_experts else LAYOUTS, small_store, tmp_path)


@pytest.mark.nightly
def test_further_layouts_give_the_losses_of_one_rank(started, small_store, tmp_path: Path):
    more = LAYOUTS | FURTHER if started[0] == "mixtral" else FURTHER
    require_same(started, more, small_store, tmp_path)


@pytest.mark.parametrize("way", ["joined", pytest.param("divided", marks=pytest.mark.nightly)])
def test_a_stage_with_divided_experts_is_resumed_on_one_rank_and_the_other_way(
    started, small_store, tmp_path: Path, way: str
):
    family, start, alone = started
    if family != "mixtral":
        pytest.skip("a model without experts")
    both = [{"ranks": 2, "layout": {"dp": 2, "ep": 2}}, {"ranks": 1, "layout": {}}]
    first, second = [
        TrainingRun(
            tmp_path / way, small_store, card=CARDS[family], steps=STEPS, every=5, start=start, **of
        )
        for of in (both if way == "joined" else reversed(both))
    ]
    first.kill_after(6)
    steps = second.finish()
    assert len(steps) == STEPS
    losses = pytest.approx([step["loss"] for step in alone], rel=1e-4)
    assert [step["loss"] for step in steps] == losses
