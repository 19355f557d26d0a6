# SPDX-License-Identifier: Apache-2.0
"""Profiled steps have the losses of others, and their files say what the steps did."""

import gzip
import json

import pytest

from custom_modules.profiling.step_parts import PREFIX
from tests.runs.conftest import TrainingRun
from tests.runs.train import BATCH, LAYERS, SEQ_LENGTH

pytestmark = pytest.mark.slow

FIRST, LAST, STEPS = 2, 3, 4
BATCHES = 2 * (BATCH // SEQ_LENGTH)
"""Micro-batches of both profiled steps, each of one sequence."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_store):
    """Return a plain run and one that is profiled on its second rank; both rebuild layers."""
    folder = tmp_path_factory.mktemp("profiled")
    layout = {"cp": 2, "kind": "ring", "recompute": {"kind": "kept_attention"}}
    shared = {"ranks": 2, "layout": layout, "steps": STEPS}
    plain = TrainingRun(folder / "plain", small_store, **shared)
    wanted = {"first": FIRST, "last": LAST, "ranks": [1], "shapes": True}
    profile = {"folder": str(folder / "profile"), **wanted}
    profiled = TrainingRun(folder / "profiled", small_store, **shared, profile=profile)
    plain.finish()
    profiled.finish()
    return plain, profiled, folder / "profile"


@pytest.fixture(scope="module")
def trace(runs):
    with gzip.open(runs[2] / "rank_1_steps_2_to_3.pt.trace.json.gz") as file:
        return json.load(file)["traceEvents"]


def test_a_profile_changes_no_loss_and_no_gradient(runs):
    plain, profiled, _ = runs
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in profiled.steps()] == [step[name] for step in plain.steps()]


def test_only_the_chosen_rank_writes_and_nothing_half_written_is_left(runs):
    assert sorted(path.name for path in runs[2].iterdir()) == [
        "rank_1_steps_2_to_3.memory.json",
        "rank_1_steps_2_to_3.pt.trace.json.gz",
        "summary.json",
    ]


def test_the_trace_has_the_profiled_steps_and_a_range_for_each_part(trace):
    named = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    assert sorted(name for name in named if name.startswith("step ")) == ["step 2", "step 3"]
    count = {name: named.count(PREFIX + name) for name in ("attention", "MLP", "loss")}
    of_layers = BATCHES * LAYERS
    assert count == {"attention": of_layers, "MLP": of_layers, "loss": BATCHES}
    for part in ("attention backward", "MLP backward", "attention recompute"):
        assert named.count(PREFIX + part) == of_layers, part
    for part in ("forward", "backward", "data wait"):
        assert named.count(PREFIX + part) == BATCHES, part
    for part in ("optimizer", "gradient reduction"):
        assert named.count(PREFIX + part) == LAST - FIRST + 1, part
    assert named.count(PREFIX + "exchange wait") >= of_layers
    assert any("Input Dims" in event.get("args", {}) for event in trace)


def test_attention_s_backward_has_its_kernel_and_the_mlp_s_has_not(trace):
    spans = {
        part: [
            (event["ts"], event["ts"] + event["dur"], event["tid"])
            for event in trace
            if event["name"] == f"{PREFIX}{part} backward"
        ]
        for part in ("attention", "MLP")
    }
    kernels = [
        event
        for event in trace
        if event["name"] == "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    ]

    def within(part):
        return [
            any(
                start <= kernel["ts"] < end and thread == kernel["tid"]
                for start, end, thread in spans[part]
            )
            for kernel in kernels
        ]

    assert kernels
    assert all(within("attention"))
    assert not any(within("MLP"))


def test_the_summary_names_parts_and_operators_by_their_time(runs):
    summary = json.loads((runs[2] / "summary.json").read_text())
    assert (summary["rank"], summary["steps"], summary["profiled_steps"]) == (1, [2, 3], 2)
    parts = {row["name"]: row for row in summary["parts"]}
    seconds = [row["host_seconds"] for row in summary["parts"]]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < parts["attention"]["host_seconds"] < parts["forward"]["host_seconds"]
    assert parts["forward"]["host_seconds"] < summary["seconds"]
    own = sum(row["seconds"] for row in summary["operators"])
    assert 0 < own <= summary["seconds"]
    assert summary["exposed_communication_seconds"] is None
    assert "operator" in (runs[1].folder / "output.log").read_text()


def test_the_memory_on_cpu_is_that_of_the_project_s_own_counter(runs):
    memory = json.loads((runs[2] / "rank_1_steps_2_to_3.memory.json").read_text())
    assert memory["step"] == LAST
    assert (
        sum(memory["at_peak_bytes"].values()) - memory["at_peak_bytes"]["host"]
        == (memory["step_peak_bytes"])
    )
    assert memory["most_bytes"]["attention"] > 0
    state = memory["state_bytes"]
    assert state["optimizer"] >= state["weights"] > 0  # two moments, shared by the two ranks
    assert memory["peak_bytes"] == memory["step_peak_bytes"] + sum(state.values())
