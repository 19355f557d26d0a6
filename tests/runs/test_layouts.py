# SPDX-License-Identifier: Apache-2.0
"""The same stage under every kind of parallelism trains the same model."""

import pytest

pytestmark = pytest.mark.slow

PARTS = ("forward", "backward", "communication", "optimizer", "copy", "data_wait")
STEPS = 8
"""Steps of each run: a checkpoint, and a moment behind it at which a run is killed."""
LAYOUTS = {"cp": {"cp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "dp": {"dp": 2}}


@pytest.fixture(scope="module")
def start(tmp_path_factory, small_store):
    """Return the checkpoints of five steps on one rank, from which every layout begins.

    Weights drawn at random depend on the layout: each pipeline stage draws from its own seed.
    """
    from tests.runs.conftest import TrainingRun

    run = TrainingRun(tmp_path_factory.mktemp("start"), small_store, ranks=1, layout={}, steps=5)
    run.finish()
    return str(run.metrics.parent / "checkpoints")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, small_store, start):
    from tests.runs.conftest import TrainingRun

    folder = tmp_path_factory.mktemp("one_rank")
    run = TrainingRun(folder, small_store, ranks=1, layout={}, start=start, steps=STEPS)
    return run.finish()


@pytest.mark.parametrize(
    "kind",
    [
        "cp",
        pytest.param("tp", marks=pytest.mark.nightly),  # a stage goes on under it, below
        pytest.param("pp", marks=pytest.mark.nightly),  # with documents apart, below
        "dp",
    ],
)
def test_two_ranks_give_the_losses_of_one_at_each_step(kind, training_run, one_rank, start):
    steps = training_run(kind, ranks=2, layout=LAYOUTS[kind], start=start, steps=STEPS).finish()
    assert len(steps) == STEPS
    for ours, reference in zip(steps, one_rank, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), ours["step"]
        assert ours["samples"] == reference["samples"]
        assert ours["lr"] == reference["lr"]
        for name in ("documents", "sum_squared_lengths", "padding_tokens"):
            assert ours[name] == reference[name]
        positions = pytest.approx(reference["loss_by_position"], rel=1e-4)
        assert ours["loss_by_position"] == positions
        assert ours["loss_by_source"]["documents"] == pytest.approx(ours["loss"], rel=1e-5)
        parts = [ours[f"{part}_seconds"] for part in PARTS]
        assert 0 < sum(parts) <= ours["seconds"]
        assert min(parts[:2]) > 0
        assert len(ours["host_memory_bytes_by_rank"]) == 2


@pytest.mark.nightly
def test_three_stages_of_four_layers_give_the_losses_of_one_rank(training_run, one_rank, start):
    layout = {"pp": 3, "recompute": {"kind": "kept_attention"}}
    run = training_run("uneven", ranks=3, layout=layout, start=start, steps=STEPS)
    for ours, reference in zip(run.finish(), one_rank, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), ours["step"]


@pytest.mark.nightly
def test_an_interleaved_pipeline_gives_the_losses_of_one_rank(training_run, one_rank, start):
    layout = {"pp": 2, "vpp": 2, "recompute": {"kind": "kept_attention"}}
    run = training_run("interleaved", ranks=2, layout=layout, start=start, steps=STEPS)
    steps = run.finish()
    assert len(steps) == STEPS
    for ours, reference in zip(steps, one_rank, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), ours["step"]
        assert ours["samples"] == reference["samples"]


@pytest.mark.nightly  # test_kinds has a ring and a hybrid within documents
def test_documents_are_kept_apart_by_two_ranks_as_by_one(training_run, start):
    shared = {"start": start, "steps": 8, "sequences": 4}
    options = {"documents": "within", **shared}
    alone = training_run("apart", ranks=1, layout={}, **options).finish()
    across = training_run("across", ranks=1, layout={}, **shared).finish()
    losses = [step["loss"] for step in across]
    assert [step["loss"] for step in alone] != pytest.approx(losses, rel=1e-4)
    for name, layout in {"chunked": {"cp": 2, "kind": "head_chunked"}, "stages": {"pp": 2}}.items():
        steps = training_run(name, ranks=2, layout=layout, **options).finish()
        for ours, reference in zip(steps, alone, strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), (name, ours["step"])


def test_bf16_with_the_memory_stack_and_tensor_ranks_follows_fp32(training_run, one_rank, start):
    layout = {
        "tp": 2,
        "precision": "bf16",
        "recompute": {"kind": "kept_attention", "every": 2, "others": "full"},
        "tiling": {"loss": True, "loss_tile": 100, "mlp": True, "mlp_tile": 100},
        "offload": {"tensors": "both", "cap_gib": 0.1},
    }
    steps = training_run("bf16", ranks=2, layout=layout, start=start, steps=STEPS).finish()
    for ours, reference in zip(steps, one_rank, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=2e-2), ours["step"]


def test_a_stage_goes_on_under_another_layout_with_its_optimizer(training_run, one_rank, start):
    run = training_run("moved", ranks=2, layout={"cp": 2}, start=start, steps=STEPS, every=5)
    run.kill_after(6)
    run.options["layout"] = {"tp": 2}
    for ours, reference in zip(run.finish(), one_rank, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), ours["step"]
