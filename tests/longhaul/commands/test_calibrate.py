# SPDX-License-Identifier: Apache-2.0
"""`longhaul calibrate` and `plan --calibrate`: a node, a run, a file of steps; refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.calibration import CLUSTER, ladder
from longhaul.jobs.calibration import write_shares
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.kernels import kernels_on
from recipes.planner.memory import memory
from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.memory_constants import MemoryConstants
from recipes.spec.units import GiB, K
from tests.house.rooms import TREE

TRUE = {"matmul": 0.5, "attention_forward": 0.3, "attention_backward": 0.25, "memory": 0.4}
WORDS = "ulysses2 cpu fp32"


@pytest.fixture
def own(tmp_path):
    """A cluster file of two CPU ranks."""
    path = tmp_path / "own.yaml"
    content = CLUSTER.replace("  nvlink", "  # a wire\n  nvlink")
    path.write_text(
        "# mine\n"
        + content.replace("  gpus_per", "  efficiency: {layer_seconds: 2.0e-3}\n  gpus_per")
    )
    return path


def seconds(own, length, words=WORDS, batch=8 * K):
    """Return those of a step of the tiny card on a machine with the true shares."""
    machine = cluster.load(str(own))
    machine = replace(machine, efficiency=replace(machine.efficiency, **TRUE))
    workload = Workload(
        card=CARDS["tiny"], seq_length=length, tokens_per_batch=batch,
        layout=layout_from(words), gpus_per_node=2,
    )  # fmt: skip
    return time(workload, machine).step


@pytest.fixture
def steps(tmp_path, own):
    """A file of measured steps."""
    path = tmp_path / "steps.yaml"
    listed = [
        {"seq": f"{length}K", "layout": WORDS, "tokens_per_batch": "8K",
         "step_seconds": seconds(own, length * K)}
        for length in (1, 2, 4)
    ]  # fmt: skip
    path.write_text(yaml.safe_dump(listed))
    return path


@pytest.fixture
def run(tmp_path, small_store, own):
    """A run folder of the tiny ladder with steps that take the true time."""
    from longhaul.jobs import ladder_run, local_chain
    from recipes.ladders import LADDERS
    from recipes.shipped.machines import Machines

    plan = ladder_run.plan(LADDERS["tiny"], CARDS["tiny"], tmp_path / "runs" / "tiny", small_store)
    resolved = local_chain.stages(plan, ladder_run.rows(plan, Machines()), (), None)
    local_chain.write_records(plan, resolved)
    for stage in resolved:
        words = "dp2 cpu fp32" if stage.seq_length == 512 else WORDS
        took = seconds(own, stage.seq_length, words, stage.tokens_per_batch)
        lines = [_line(step, 9.0 if step < 3 else took) for step in range(1, 9)]
        stage.metrics.write_text("".join(lines))
    return plan.run


def _line(step, seconds, ranks=2):
    rate = 8 * K / seconds / ranks
    facts = {"step": step, "loss": 1.0, "tokens": 8 * K, "seconds": seconds}
    return json.dumps(facts | {"tokens_per_second_per_rank": rate}) + "\n"


def test_a_file_of_steps_is_written_into_the_cluster_file_and_its_text_stays(answer, own, steps):
    before = own.read_text()
    code, shown, said = answer("calibrate", "--cluster", own, "--run", steps, "--card", "tiny")
    assert code == 0, said
    assert shown.count("│ ") >= 3
    assert "predicted times are within about 5%, by leaving one step out" in shown
    after = own.read_text()
    assert "# mine\n" in after
    assert "  # a wire\n  nvlink_gbps: 5\n" in after
    kept = [line for line in after.splitlines() if line in before.splitlines()]
    assert kept == [line for line in before.splitlines() if "efficiency" not in line]
    assert after.count("# calibrated ") == 1
    assert cluster.load(str(own)).efficiency.time_error == 0.05
    predicted = answer("plan", "tiny", "--seq", "8K", "--tokens-per-batch", "8K", "--cluster", own,
                       "--layout", WORDS, "--json")  # fmt: skip
    (plan,) = json.loads(predicted.out)["plans"]
    assert plan["calibrated"]
    assert plan["step_seconds"] == pytest.approx(seconds(own, 8 * K), rel=0.05)
    low, high = plan["tokens_per_second_per_gpu_range"]
    assert low * 1.05 == pytest.approx(high / 1.05)


def test_peaks_of_a_file_become_constants_of_memory(answer, own, steps):
    words = ("calibrate", "--cluster", own, "--run", steps, "--card", "tiny")
    assert "bytes are not fitted: no step has device_memory_bytes" in answer(*words).out
    assert "memory" not in yaml.safe_load(own.read_text())["hardware"]
    listed = yaml.safe_load(steps.read_text())
    for length, one in zip((1, 2, 4), listed, strict=True):
        one["peak_gib"] = peak(own, length * K)
    steps.write_text(yaml.safe_dump(listed))
    code, shown, said = answer(*words)
    assert code == 0, said
    assert "predicted over measured bytes of the fullest rank" in shown
    assert "predicted bytes are within about 2%, by leaving one step out" in shown
    assert cluster.load(str(own)).memory.reserve_gib == pytest.approx(2.5, abs=0.1)
    plan = ("plan", "tiny", "--seq", "8K", "--tokens-per-batch", "8K", "--cluster", own,
            "--layout", WORDS)  # fmt: skip
    assert "GiB, by the calibration\n" in answer(*plan).out
    (found,) = json.loads(answer(*plan, "--json").out)["plans"]
    assert found["memory_calibrated"]
    assert found["memory_total_bytes"] == pytest.approx(peak(own, 8 * K) * GiB, rel=0.02)
    answer(*words)
    assert own.read_text().count("\n  memory:") == own.read_text().count("# calibrated ") == 1


def peak(own, length):
    """Return the true GiB of a step of the tiny card, with a reserve of 2.5 GiB."""
    machine = replace(cluster.load(str(own)), memory=MemoryConstants(reserve_gib=2.5))
    workload = Workload(
        card=CARDS["tiny"], seq_length=length, tokens_per_batch=8 * K,
        layout=layout_from(WORDS), gpus_per_node=2,
    )  # fmt: skip
    return memory(workload, kernels_on(machine)).total / GiB


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (-1.0, "step 1: peak_gib is -1.0; it must be positive"),
        (9.0, "a peak of 9.0 GiB is more than the 8 GiB of a core"),
        (1e-4, "is less than weights, gradients and optimizer take"),
    ],
)
def test_a_peak_that_cannot_be_is_told_and_the_file_stays(answer, own, steps, size, said):
    _change(steps, "- layout", f"- peak_gib: {size}\n  layout")
    before = own.read_text()
    assert said in answer("calibrate", "--cluster", own, "--run", steps, "--card", "tiny").error()
    assert own.read_text() == before


def test_the_logged_peaks_of_a_run_are_fitted_too(answer, own, run):
    for metrics in run.glob("stages/*/metrics.jsonl"):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        text = [json.dumps(one | {"device_memory_bytes": int(3 * GiB)}) + "\n" for one in lines]
        metrics.write_text("".join(text))
    made = answer("calibrate", "--cluster", own, "--run", run, "--card", "tiny", "--json")
    found = json.loads(made.out)["memory"]
    assert 2.5 < found["reserve_gib"] < 3
    assert found["error"] > 0


def test_calibrating_again_replaces_the_shares(answer, own, steps):
    words = ("calibrate", "--cluster", own, "--run", steps, "--card", "tiny")
    assert answer(*words).code == 0
    first = own.read_text()
    assert answer(*words, "--run", steps).code == 0
    again = own.read_text()
    assert again.count("efficiency:") == again.count("# calibrated ") == 1
    assert len(again.splitlines()) == len(first.splitlines())


def test_the_stages_of_a_run_are_measured_steps(answer, own, run):
    code, shown, said = answer(
        "plan", "tiny", "--seq", "16K", "--cluster", own, "--calibrate", run, "--gpus", 2
    )
    assert code == 0, said
    assert all(f"tiny_{length}" in shown for length in ("512", "2k", "8k"))
    assert "tokens/s/GPU, by the calibration, and" in shown
    assert cluster.load(str(own)).efficiency.time_error > 0


def test_json_has_the_shares_and_nothing_else(answer, own, run):
    made = answer("calibrate", "--cluster", own, "--run", run, "--card", "tiny", "--json")
    found = json.loads(made.out)
    assert found["efficiency"]["time_error"] == cluster.load(str(own)).efficiency.time_error
    plan = answer("plan", "tiny", "--seq", "8K", "--gpus", 2, "--cluster", own, "--calibrate", run,
                  "--json")  # fmt: skip
    assert json.loads(plan.out)["plans"][0]["calibrated"]


@pytest.mark.slow
def test_this_node_s_rates_become_shares(answer, own):
    code, shown, said = answer("calibrate", "--cluster", own, "--device", "cpu")
    assert code == 0, said
    assert "2 ranks on cpu, attention by cpu_flash" in shown
    found = cluster.load(str(own)).efficiency
    assert found.time_error == 0
    assert found.layer_seconds > 0
    for name in ("matmul", "attention_forward", "attention_backward", "memory", "nvlink"):
        assert f" {name} " in shown
        assert 0.0001 < getattr(found, name) < 100


def test_the_ladder_of_the_benchmark_is_accepted(answer, tmp_path):
    (tmp_path / "ladder.yaml").write_text(ladder(16))
    code, _, said = answer("ladders", "check", tmp_path / "ladder.yaml", "--card", "tiny")
    assert code == 0, said
    assert "start: scratch" not in said


def test_a_share_in_round_powers_of_ten_is_a_number_in_the_file(own):
    shares = replace(cluster.load(str(own)).efficiency, matmul=4e-5, nvlink=1.0)
    write_shares(own, shares, "by hand")
    assert cluster.load(str(own)).efficiency == shares


def _change(path: Path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--run", "{steps}"), "--card is missing; name the model that --run trained"),
        (("--card", "tiny"), "--card is that of a run; add --run"),
        (("--run", "{steps}", "--card", "tiny", "--ranks", "2"), "--ranks and --device are of a"),
        (("--run", "nope", "--card", "tiny"), "nope is not there; name a run folder, or a YAML"),
        (("--run", "{here}/own.yaml", "--card", "tiny"), "own.yaml"),
        (("--run", "{here}", "--card", "tiny"), "is not a run folder"),
        (("--run", "{run}", "--card", "llama31_8b"), "trained another model than llama31_8b"),
        (("--device", "tpu"), "--device is 'tpu'; expected cpu or cuda"),
    ],
)
def test_mistakes_are_told_and_the_file_stays(answer, own, steps, run, tmp_path, words, said):
    before = own.read_text()
    given = [word.format(steps=steps, run=run, here=tmp_path) for word in words]
    assert said in answer("calibrate", "--cluster", own, *given).error()
    assert own.read_text() == before


def test_a_shipped_cluster_file_is_not_written_to(answer, steps):
    said = answer("calibrate", "--cluster", "dgx_h100", "--run", steps, "--card", "tiny").error()
    assert "dgx_h100 is a shipped one; copy" in said
    assert "--cluster is missing" in answer("calibrate", "--run", steps, "--card", "tiny").error()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("8K", "seven", "step 1: a length is a number, with K or M"),
        ("ulysses2", "ulises2", "step 1: "),
        ("step_seconds", "seconds", "'step_seconds'"),
        ("step_seconds: ", "step_seconds: -", "it must be positive"),
        ("tokens_per_batch: 8K", "tokens_per_batch: 8M", "of the peak of a core"),
    ],
)
def test_a_file_with_a_mistake_is_told(answer, own, steps, old, new, said):
    _change(steps, old, new)
    assert said in answer("calibrate", "--cluster", own, "--run", steps, "--card", "tiny").error()


def test_a_layout_that_changed_within_a_stage_is_told(answer, own, run):
    metrics = run / "stages" / "tiny_2k" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + _line(9, 0.5, ranks=4))
    said = answer("calibrate", "--cluster", own, "--run", run, "--card", "tiny").error()
    assert "stage tiny_2k: steps were taken by 2 and 4 ranks and its recipe has 2" in said


def test_steps_that_record_no_time_do_not_count(answer, own, run):
    metrics = run / "stages" / "tiny_2k" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 9, "loss": 1.0, "seconds": null}\n')
    assert answer("calibrate", "--cluster", own, "--run", run, "--card", "tiny").code == 0


def test_a_run_without_enough_steps_is_told(answer, own, run):
    for metrics in run.glob("stages/*/metrics.jsonl"):
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    said = answer("calibrate", "--cluster", own, "--run", run, "--card", "tiny").error()
    assert "has no stage with 5 timed steps (tiny_512 has 4, tiny_2k has 4, tiny_8k has 4)" in said


def test_steps_of_cpu_ranks_are_not_for_a_file_of_gpus(answer, own, run, steps):
    _change(own, "  efficiency: {layer_seconds: 2.0e-3}\n", "")
    for source in (run, steps):
        words = ("calibrate", "--cluster", own, "--run", source, "--card", "tiny")
        assert "own.yaml describes GPUs; name a cluster file of CPU" in answer(*words).error()


def test_steps_of_gpus_are_not_for_a_file_of_cpu_ranks(answer, own, steps):
    steps.write_text(steps.read_text().replace(WORDS, "ulysses2"))
    words = ("calibrate", "--cluster", own, "--run", steps, "--card", "tiny")
    assert "was trained on GPUs and" in answer(*words).error()


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on GPUs")
def test_a_machine_without_a_gpu_is_measured_only_if_asked(answer, own):
    assert "this machine has no GPU" in answer("calibrate", "--cluster", own).error()


def test_hardware_in_one_line_is_told_what_to_write(answer, own, steps):
    content = yaml.safe_load(own.read_text())
    own.write_text(yaml.safe_dump(content, default_flow_style=True))
    said = answer("calibrate", "--cluster", own, "--run", steps, "--card", "tiny").error()
    assert "line for each field; write into it: efficiency: {" in said
    assert ", matmul: " in said


def test_a_cluster_file_without_write_permission_is_told(answer, own, steps, monkeypatch):
    folder = own.parent / "locked"
    folder.mkdir()
    shutil.copy(own, folder)
    monkeypatch.setattr("longhaul.jobs.calibration.write_text", _refuse)
    said = answer("calibrate", "--cluster", folder / "own.yaml", "--run", steps, "--card", "tiny")
    assert "permission denied" in said.error()


def _refuse(path, text):
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize("name", cluster.names())
def test_shares_are_written_into_a_copy_of_each_shipped_file(name, tmp_path):
    shipped = cluster.load(name)
    path = tmp_path / "mine.yaml"
    path.write_text((TREE / "slurm" / "clusters" / f"{name}.yaml").read_text())
    found = replace(shipped.efficiency, matmul=0.41)
    write_shares(path, found, "a test")
    assert cluster.load(str(path)).efficiency.matmul == 0.41
    before, after = (yaml.safe_load(text) for text in (
        (TREE / "slurm" / "clusters" / f"{name}.yaml").read_text(), path.read_text()
    ))  # fmt: skip
    assert {key: after[key] for key in before if key != "hardware"} == {
        key: before[key] for key in before if key != "hardware"
    }
