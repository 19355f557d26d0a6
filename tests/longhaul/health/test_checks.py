# SPDX-License-Identifier: Apache-2.0
"""The health checks on lines of metrics: what is a finding, what is none, and when one ends."""

import json
import math
import random

import pytest

from longhaul.health.checks import findings
from longhaul.health.monitor import MetricsTail, Monitor
from recipes.spec.finding import Finding, append, begins, ends, read, recorded


def steps(count: int, **more) -> list[dict]:
    """Return the lines of a healthy extension: a jump, a recovery, then noise of 0.2 nats."""
    draws = random.Random(7)
    lines = []
    for step in range(1, count + 1):
        line = {
            "step": step,
            "loss": 2.0 + 3.5 * math.exp(-step / 20) + draws.gauss(0, 0.2),
            "lr": 1e-5 * min(1.0, step / 20),
            "grad_norm": 1.0 + 200 * math.exp(-step / 5),
            "seconds": 10.0 + draws.gauss(0, 0.5) + (40 if step % 50 == 0 else 0),
            "data_wait_seconds": 0.01,
            "slow_ranks": [],
            "host_private_bytes": int(4e9 + (1e9 if step % 50 < 3 else 0)),
            "host_private_rank": 0,
            "gpu_utilization": 97.0,
        }
        lines.append(line | {key: value(step) for key, value in more.items()})
    return lines


def found(lines: list[dict]) -> dict[str, Finding]:
    """Return the findings at the last line by kind."""
    return {finding.kind: finding for finding in findings(lines)}


def test_a_healthy_extension_has_no_finding_at_any_step():
    lines = steps(700)
    assert [step for step in range(1, 701, 3) if findings(lines[:step])] == []


def test_old_lines_with_a_step_and_a_loss_alone_have_no_finding():
    assert findings([{"step": step, "loss": 2.0} for step in range(1, 300)]) == []
    assert findings([]) == []


def test_the_rank_that_the_others_wait_for_is_named():
    slow = {"ranks": [3], "seconds": 13.0, "times_the_others": 1.4}
    lines = steps(60, slow_ranks=lambda step: [slow] if step > 40 else [])
    assert "straggler" not in found(lines[:45])
    finding = found(lines)["straggler"]
    assert finding.ranks == (3,)
    assert finding.step == 45
    assert "rank 3 takes 1.40 times as long" in finding.said


def test_ranks_that_take_turns_in_being_slow_are_noise():
    assert "straggler" not in found(
        steps(60, slow_ranks=lambda step: [{"ranks": [step % 2], "times_the_others": 1.4}])
    )


def test_a_slow_gpu_of_the_detector_is_a_straggler():
    slow = [{"rank": 9, "node": "n2", "score": 0.62}]
    finding = found(steps(30, slow_gpus=lambda step: slow if step == 30 else []))["straggler"]
    assert finding.ranks == (9,)
    assert "rank 9 on n2 computes at 62%" in finding.said


def test_steps_that_wait_for_their_data_are_starved_and_the_rank_is_named():
    waits = steps(
        60,
        data_wait_seconds=lambda step: 0.01,
        longest_data_wait_seconds=lambda step: 3.0 if step > 45 and step % 2 else 0.01,
        longest_data_wait_rank=lambda step: 1,
    )
    finding = found(waits)["data_starvation"]
    assert (finding.step, finding.ranks) == (47, (1,))
    assert "data_starvation" not in found(waits[:47])


def test_one_long_stall_is_named_at_once_and_the_opening_of_the_data_is_not():
    assert "data_starvation" in found(steps(30, data_wait_seconds=lambda s: 45.0 * (s == 30)))
    opening = steps(10, data_wait_seconds=lambda step: 45.0 if step == 1 else 0.01)
    assert findings(opening) == []


@pytest.mark.parametrize(("percent", "share"), [(30.0, "30%"), (0.8, "1%"), (0.0, "0%")])
def test_gpus_that_are_idle_half_of_the_time_are_named_with_the_cause(percent, share):
    lines = steps(40, gpu_utilization=lambda _: percent)
    assert f"busy for {share} of the time" in found(lines)["low_utilization"].said
    starved = steps(
        40, gpu_utilization=lambda _: percent, data_wait_seconds=lambda _: 5.0
    )  # fmt: skip
    assert found(starved)["low_utilization"].cause == "the GPUs wait for data"


def test_ranks_without_a_figure_of_their_gpus_are_not_idle():
    assert "low_utilization" not in found(steps(40, gpu_utilization=lambda _: None))


def test_memory_that_grows_all_along_creeps_and_a_late_buffer_does_not():
    grows = steps(120, host_private_bytes=lambda step: int(4e9 + step * 2e7))
    finding = found(grows)["memory_creep"]
    assert finding.ranks == (0,)
    assert "19.1 MiB a step" in finding.said
    jumps = steps(120, host_private_bytes=lambda step: int(4e9 + (step > 70) * 3e9 + step))
    assert "memory_creep" not in found(jumps)
    on_gpu = steps(120, device_allocated_bytes=lambda step: int(4e10 + step * 1e8))
    assert "GPU memory" in found(on_gpu)["memory_creep"].said


def test_memory_of_an_earlier_process_does_not_count():
    lines = steps(120, host_private_bytes=lambda step: int(4e9 + step * 2e7))
    assert "memory_creep" not in {finding.kind for finding in findings(lines, started=90)}


@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_a_slow_divergence_is_named_and_a_plateau_is_not(noise):
    draws = random.Random(3)

    def loss(step: int, slope: float) -> float:
        rise = slope * max(0, step - 300)
        return 2.0 + 3.5 * math.exp(-step / 20) + rise + draws.gauss(0, noise)

    rising = steps(900, loss=lambda step: loss(step, 1e-3))
    finding = found(rising)["divergence"]
    assert finding.step < 600
    flat = steps(900, loss=lambda step: loss(step, 0.0))
    assert [step for step in range(1, 901, 7) if findings(flat[:step])] == []


def test_a_spike_after_the_warm_up_is_named_for_some_steps_and_the_first_jump_never():
    lines = steps(200, loss=lambda step: 4.5 if step == 190 else 2.0 + 0.01 * (step % 3))
    assert found(lines[:190])["spike"].step == 190
    assert "spike" in found(lines[:195])
    assert "spike" not in found(lines)
    jump = steps(15, loss=lambda step: 2.0 if step < 8 else 5.5)
    assert findings(jump) == []


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_the_first_step_without_a_number_is_named(key):
    lines = steps(30, **{key: lambda step: math.nan if step >= 28 else 2.0})
    assert found(lines)["not_finite"].step == 28


def test_a_finding_is_recorded_when_it_begins_and_when_it_ends_not_at_each_step(tmp_path):
    lines = steps(
        90, longest_data_wait_seconds=lambda step: 5.0 if 40 <= step < 50 else 0.01,
        longest_data_wait_rank=lambda step: 0,
    )  # fmt: skip
    monitor = Monitor()
    for step in range(1, 91):
        begun, ended = monitor.check(lines[:step])
        append(tmp_path, [*map(begins, begun), *(ends(one, step) for one in ended)])
    record = read(tmp_path)
    assert [(one["state"], one["kind"]) for one in record] == [
        ("begins", "data_starvation"), ("ends", "data_starvation"),
    ]  # fmt: skip
    assert record[0]["step"] == 40
    assert recorded(record[:1])[0][0].kind == "data_starvation"
    assert recorded(record)[0] == []
    (tmp_path / "health.jsonl").open("a").write('{"kind": "stra\n\n[1]\n{"kind": 3}\n')
    assert read(tmp_path) == record


def test_the_tail_of_a_file_takes_cut_lines_rewrites_and_a_folder_that_comes_back(tmp_path):
    path = tmp_path / "stage" / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.poll() == []
    path.parent.mkdir()
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [line["step"] for line in tail.poll()] == [1]
    with path.open("a") as file:
        file.write('ss": 3.0}\nnot json\n\x00\xff\n')
    assert [line["loss"] for line in tail.poll()] == [3.0]
    path.parent.rename(tmp_path / "away")
    assert tail.poll() == []
    (tmp_path / "away").rename(path.parent)
    assert tail.poll() == []
    assert [line["step"] for line in tail.lines] == [1, 2]
    temporary = path.with_suffix(".tmp")  # as the step log rewrites it at a resume
    temporary.write_text(json.dumps({"step": 1, "loss": 2.5}) + "\n")
    temporary.replace(path)
    assert [line["loss"] for line in tail.poll()] == [2.5]
    assert [line["step"] for line in tail.lines] == [1]
