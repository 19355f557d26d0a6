# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor oom` and `slow`: their pages and their refusals."""

import json
import shlex

import pytest

from recipes.notation.layout import layout_from, words_of
from recipes.planner.plan import plan
from recipes.planner.tensor_sizes import matching, tensor_sizes
from recipes.planner.workload import Workload
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from tests.longhaul.test_light_commands import after

NAME = "llama3_8b_nemo_64k"
ROW = ROWS[NAME]
GIB = 2**30


def of(words: str) -> Workload:
    return Workload(
        card=ROW.card,
        seq_length=ROW.seq_length,
        tokens_per_batch=ROW.stage.tokens_per_batch,
        layout=layout_from(words),
        gpus_per_node=8,
    )


def failed(asked: float, allocated: float, *, unused: float = 0.5, capacity: float = 79.1) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 3 has "
        f"a total capacity of {capacity:.2f} GiB of which 0.31 GiB is free. Including non-PyTorch "
        f"memory, this process has {allocated + unused + 4:.2f} GiB memory in use. Of the "
        f"allocated memory {allocated:.2f} GiB is allocated by PyTorch, and {unused:.2f} GiB is "
        "reserved by PyTorch but unallocated.\n"
    )


def test_a_size_is_known_by_its_tensor():
    job = of("tp2 dp4")
    logits = 65_536 * 128_256 // 2 * 2
    assert tensor_sizes(job)["logits"] == logits
    assert matching(job, logits) == ["logits"]
    assert "the MLP's intermediate" in matching(job, 65_536 * 14_336 / 2 * 2)[0]
    assert matching(job, logits * 1.05) == []


def test_a_layout_that_does_not_fit_gets_a_command_that_the_planner_says_fits(answer):
    said = answer("doctor", "oom", "--factory", NAME, "--layout", "tp2 dp4")
    assert said.code == 0, said.err
    assert "GiB too much" in said.out
    assert "what fits: " in said.out
    joined = said.out.replace("\\\n", " ")
    line = next(x for x in joined.splitlines() if x.strip().startswith("longhaul pretrain"))
    words = shlex.split(line, comments=True)
    assert words[:4] == ["longhaul", "pretrain", "--factory", NAME]
    assert all("=" in word for word in words[4:])


def test_a_shipped_recipe_fits_and_nothing_has_to_change(answer):
    said = answer("doctor", "oom", "--factory", NAME)
    assert "to spare" in said.out
    assert "nothing has to change" in said.out


def test_the_log_names_the_tensor_and_fragmentation(answer, tmp_path):
    log = tmp_path / "output.log"
    size = tensor_sizes(of("tp2 dp4"))["logits in fp32"] / GIB
    log.write_text(failed(size, 50, unused=20))
    said = answer("doctor", "oom", "--factory", NAME, "--layout", "tp2 dp4", "--log", log)
    assert "that is the size of logits in fp32" in said.out
    assert "expandable_segments:True" in said.out


def test_a_prediction_far_below_the_log_is_said_and_counted(answer, tmp_path):
    log = tmp_path / "output.log"
    log.write_text(failed(20, 74, capacity=79.1))
    said = answer("doctor", "oom", "--factory", NAME, "--log", log)
    assert f"longhaul probe memory --factory {NAME}" in said.out
    assert "what fits: " in said.out


def test_a_log_of_another_gpu_is_noticed(answer, tmp_path):
    log = tmp_path / "output.log"
    log.write_text(failed(10, 28, capacity=39.4))
    said = answer("doctor", "oom", "--factory", NAME, "--log", log)
    assert "name yours with --cluster" in said.out


def test_host_memory_that_ran_out_is_no_matter_of_the_gpu(answer, tmp_path):
    log = tmp_path / "output.log"
    log.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n")
    said = answer("doctor", "oom", "--factory", NAME, "--log", log)
    assert "--mem=0" in said.out
    assert "remedies" not in said.out


def metrics(run, seconds, *, gpus=8, name=NAME):
    folder = run / "stages" / name
    folder.mkdir(parents=True)
    tokens = ROW.stage.tokens_per_batch
    lines = [
        {"step": n, "loss": 2.0, "tokens": tokens, "seconds": x,
         "tokens_per_second_per_rank": tokens / x / gpus}
        for n, x in enumerate(seconds, 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_slow_names_the_causes_and_a_faster_layout(answer):
    said = answer("doctor", "slow", "--factory", NAME, "--layout", "tp8 full")
    assert said.code == 0, said.err
    assert ": exposed over the fast link" in said.out
    assert "full runs parts of the forward again" in said.out
    assert "512 columns" in said.out
    assert "faster on these GPUs: " in said.out


def test_slow_has_nothing_faster_for_the_planners_own_layout(answer):
    said = answer("doctor", "slow", "--factory", NAME)
    assert "no layout of these GPUs that is 2% faster" in said.out


def test_slow_compares_a_run_with_the_plan(answer, tmp_path):
    planned = plan(of(words_of(ROW.layout)), cluster.load(ROW.cluster)).time.step
    step = 2 * planned
    metrics(tmp_path / "run", [900, 260, step, step, step, step, step, 500])
    said = answer("doctor", "slow", "--factory", NAME, "--run", tmp_path / "run")
    assert "50% of the prediction" in said.out
    assert "step 1 took 900.0 s" in said.out
    assert "one step in twenty takes 500.0 s" in said.out
    assert "does not explain this" in said.out
    assert "the run has" not in said.out


def test_slow_says_that_a_rate_above_the_peak_is_impossible(answer, tmp_path):
    planned = plan(of(words_of(ROW.layout)), cluster.load(ROW.cluster)).time.step
    metrics(tmp_path / "run", [planned / 3] * 6)
    said = answer("doctor", "slow", "--factory", NAME, "--run", tmp_path / "run")
    assert "300% of the prediction" in said.out
    assert "no GPU is that fast" in said.out


def test_slow_notices_a_run_of_other_ranks(answer, tmp_path):
    metrics(tmp_path / "run", [105] * 6, gpus=16)
    said = answer("doctor", "slow", "--factory", NAME, "--run", tmp_path / "run")
    assert "the run has 16 ranks and this layout 8" in said.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("oom", "--factory", "llama3_8b_nemo_65k"), "did you mean llama3_8b_nemo_64k"),
        (("oom", "--factory", NAME, "--cluster", "dgx_h1000"), "did you mean dgx_h100"),
        (("oom", "--factory", NAME, "--log", "nowhere.log"), "log nowhere.log is not a file"),
        (("oom", "--factory", NAME, "--layout", "tp3"), "not divisible by TP 3"),
        (("oom", "--factory", NAME, "--layout", "tq2"), "is not a layout setting"),
        (("oom", "--factory", "tiny_8k"), "longhaul probe memory"),
        (("oom",), "name one recipe: --factory NAME, or --card"),
        (("oom", "--factory", NAME, "--card", "llama3_8b"), "name one recipe"),
        (("slow", "--factory", NAME, "--stage", "64K"), "name one recipe"),
        (("oom", "--card", "llama3_8b"), "--ladder is missing"),
        (("slow", "--ladder", "prolong", "--stage", "64K"), "--card is missing"),
        (("oom", "--card", "llama3_8c", "--ladder", "prolong"), "did you mean llama3_8b"),
        (("oom", "--card", "llama3_8b", "--ladder", "prolong"), "--stage is missing"),
        (
            ("oom", "--card", "llama31_405b", "--ladder", "llama31", "--stage", "128K"),
            "Name the layout that ran by --layout",
        ),
        (("oom", "--factory", "llama3_70b_nemo_128k", "--nodes", "3"), "whole number of replicas"),
        (("slow", "--factory", NAME, "--run", "nowhere"), "metrics.jsonl"),
        (("slow", "--factory", "tiny_9k"), "did you mean"),
        (("spike", "--run", "nowhere"), "there is no run folder"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else one,
)
def test_a_mistake_is_one_sentence(answer, words, why):
    assert why in answer("doctor", *words).error()


def test_the_doctor_is_light():
    for words in (("oom", "--factory", NAME), ("slow", "--factory", NAME), ("log", __file__)):
        done = after("doctor", *words)
        assert done.returncode == 0, done.stderr


def test_a_cluster_of_other_gpus_is_planned_for(answer):
    said = answer("doctor", "oom", "--factory", NAME, "--cluster", "dgx_h200")
    assert cluster.load("dgx_h200").gpu.name in said.out
