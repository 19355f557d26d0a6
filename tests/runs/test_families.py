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
LAYOUTS = {
    "context ranks, attention kept": {"cp": 2, **KEPT},
    "pipeline": {"pp": 2},
}
OF_EXPERTS = {
    "experts over data ranks": {"dp": 2, "ep": 2},
    "whole experts over tensor ranks": {"tp": 2, "ep": 2, "etp": 1, **KEPT},
}
FURTHER = {"tensor ranks": {"tp": 2}, "data ranks": {"dp": 2}}


@pytest.fixture(
    scope="module",
    params=[
        "mixtral", pytest.param("nemotron", marks=pytest.mark.nightly), "olmo3",
    ],
)  # fmt: skip
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
    return request.param, str(start), run("alone", steps=8, start=str(start)).steps()


def require_same(started, layouts: dict[str, dict], store: Path, folder: Path) -> None:
    """Train under each layout and assert the losses of one rank at each step."""
    family, start, alone = started
    assert alone[-1]["loss"] < alone[0]["loss"]
    for name, layout in layouts.items():
        run = TrainingRun(
            folder / name, store, layout=layout, card=CARDS[family], ranks=2, steps=8, start=start
        )
        steps = run.finish()
        assert len(steps) == 8
        for ours, reference in zip(steps, alone, strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), (name, ours["step"])


def test_two_ranks_give_the_losses_of_one_at_each_step(started, small_store, tmp_path: Path):
    with_experts = started[0] == "mixtral"
    require_same(started, OF_EXPERTS if with_experts else LAYOUTS, small_store, tmp_path)


@pytest.mark.nightly
def test_further_layouts_give_the_losses_of_one_rank(started, small_store, tmp_path: Path):
    more = LAYOUTS | FURTHER if started[0] == "mixtral" else FURTHER
    require_same(started, more, small_store, tmp_path)


def test_a_stage_with_divided_experts_is_resumed_on_one_rank_and_the_other_way(
    started, small_store, tmp_path: Path
):
    family, start, alone = started
    if family != "mixtral":
        pytest.skip("a model without experts")
    divided = {"ranks": 2, "layout": {"dp": 2, "ep": 2}}
    whole = {"ranks": 1, "layout": {}}
    for name, first, second in (("joined", divided, whole), ("divided", whole, divided)):
        runs = [
            TrainingRun(
                tmp_path / name, small_store, card=CARDS[family], steps=8, start=start, **of
            )
            for of in (first, second)
        ]
        runs[0].kill_after(6)  # behind the checkpoint of step 5
        assert len(runs[1].finish()) == 8
        losses = [step["loss"] for step in runs[1].steps()]
        assert losses == pytest.approx([step["loss"] for step in alone], rel=1e-4), name
