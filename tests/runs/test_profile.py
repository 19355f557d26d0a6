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
    wanted = {"first": FIRST, "last": LAST, "ranks": [1]}
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


def test_only_the_chosen_rank_writes(runs):
    assert sorted(path.name for path in runs[2].iterdir()) == [
        f"rank_1_steps_2_to_3.{kind}"
        for kind in ("memory.json", "parts.json", "pt.trace.json.gz", "table.txt")
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


def test_parts_are_listed_by_their_time_and_the_log_has_torch_s_table(runs):
    found = json.loads((runs[2] / "rank_1_steps_2_to_3.parts.json").read_text())
    parts = {row["name"]: row for row in found["parts"]}
    seconds = [row["host_seconds"] for row in found["parts"]]
    assert seconds == sorted(seconds, reverse=True)
    assert parts["attention"]["calls"] == BATCHES * LAYERS
    assert 0 < parts["attention"]["host_seconds"] < parts["forward"]["host_seconds"]
    assert found["exposed_communication_seconds"] is None
    table = (runs[2] / "rank_1_steps_2_to_3.table.txt").read_text()
    assert "aten::mm" in table
    assert table in (runs[1].folder / "output.log").read_text()


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
