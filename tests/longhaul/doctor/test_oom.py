# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor oom` on jobs that did run out of memory, and on cards that no recipe has."""

import json
import shlex

import pytest

from longhaul.doctor.case import case
from longhaul.doctor.logs.reader import read_text
from longhaul.doctor.oom import planners_choice, unexplained
from longhaul.terminal.next_commands import YOUR_CLUSTER
from recipes.notation.layout import words_of
from recipes.planner.plan import HEADROOM
from recipes.planner.search.ranking import search
from recipes.shipped.machines import Machines
from recipes.spec.units import GiB
from tests.longhaul.commands.test_doctor import NAME, failed

PLAIN = "RuntimeError: CUDA error: out of memory\n"
OF_NCCL = "n1:7:9 [2] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'\n"
FRAGMENTED = failed(2, 40, unused=30)
COMBINED = ("--card", "llama31_8b", "--ladder", "prolong", "--stage", "512K")


def faults(text: str):
    return read_text(text).faults


def commands(out: str) -> list[list[str]]:
    """Return the words of the commands of a page."""
    lines = out.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("  longhaul ")]


@pytest.mark.parametrize(
    "log",
    [PLAIN, OF_NCCL, FRAGMENTED, failed(1, 20, capacity=39.4), "CUDA Error: out of memory\n"],
    ids=["no sizes", "nccl", "fragmentation", "another GPU", "transformer engine"],
)
def test_a_job_that_ran_out_of_memory_has_something_to_change(answer, tmp_path, log):
    (tmp_path / "output.log").write_text(log)
    said = answer("doctor", "oom", "--factory", NAME, "--log", tmp_path / "output.log")
    assert "to spare" in said.out  # by the prediction it fits
    assert "nothing has to change" not in said.out
    assert "shows less than it foresees" not in said.out
    assert "what fits: " in said.out
    assert "are treated as permanently allocated: memory ran out" in said.out


def test_without_sizes_what_was_to_spare_counts_as_used_and_a_minimum_beyond():
    found = case(NAME, Machines()).plan
    assert found.fits
    headroom = HEADROOM * found.cluster.gpu_bytes
    assert unexplained(found, faults(PLAIN)) == pytest.approx(-found.short + headroom)
    assert unexplained(found, faults(OF_NCCL)) == pytest.approx(-found.short + GiB)
    assert unexplained(found, faults(OF_NCCL + PLAIN)) == pytest.approx(-found.short + headroom)
    assert unexplained(found, faults("DataLoader worker is killed by signal: Killed.")) == 0
    lacking = case(NAME, Machines(layout="tp2 dp4")).plan
    assert not lacking.fits
    assert unexplained(lacking, faults(PLAIN)) == 0  # the prediction explains it


def test_of_fragmentation_the_allocator_comes_first(answer, tmp_path):
    (tmp_path / "output.log").write_text(FRAGMENTED)
    said = answer("doctor", "oom", "--factory", NAME, "--log", tmp_path / "output.log").out
    first = "set the allocator first (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); "
    assert said.index(first + "if it still fails:") < said.index("what fits: ")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("\n\n", "the log is empty"),
        ("\x00garbage\n", "the log is not text"),
        ("step 1/10\nValueError: no such document\n", "no known fault in 2 lines"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-03-15T18:00:46 DUE TO TIME LIMIT "
         "***\n", "ended the job at its time limit"),
    ],
)  # fmt: skip
def test_a_log_without_memory_that_ran_out_gets_no_remedies(answer, tmp_path, content, why):
    (tmp_path / "output.log").write_text(content)
    asked = ("doctor", "oom", "--factory", NAME, "--layout", "tp2 dp4", "--log")
    said = answer(*asked, tmp_path / "output.log")
    assert said.code == 0, said.err
    assert why in said.out
    assert "it does not say that memory ran out" in said.out
    assert "recompute" not in said.out.partition("log: ")[2]
    stated = json.loads(answer(*asked, tmp_path / "output.log", "--json").out)
    assert (stated["remedies"], stated["cure"], stated["planners_choice"]) == ([], None, None)


def test_the_planners_choice_has_room_for_what_the_log_shows_and_is_another_layout():
    found = case(NAME, Machines())
    plans = [plan for plan in search(found.question).plans if not plan.untried]
    assert found.same_layout(plans[0].workload.layout)  # the shipped layout is the planner's own
    choice = planners_choice(found, 0.0)
    assert choice is not None
    assert choice.workload.layout == plans[1].workload.layout
    beyond = -choice.short + GiB
    roomier = planners_choice(found, beyond)
    assert roomier is None or roomier.short + beyond <= 0
    assert planners_choice(found, 100 * GiB) is None


def test_the_layout_that_failed_is_its_own_with_another_host_cap():
    found = case(NAME, Machines(layout="dp8 kept_attention tile-loss tile-mlp offload-both:60"))
    other = case(NAME, Machines(layout="dp8 kept_attention tile-loss tile-mlp offload-both:50"))
    assert found.same_layout(other.plan.workload.layout)
    assert not found.same_layout(
        case(NAME, Machines(layout="dp8 kept_attention tile-loss")).plan.workload.layout
    )


def test_whole_logits_under_a_tiled_loss_mean_that_tiling_is_not_in_effect(answer, tmp_path):
    log = tmp_path / "output.log"
    log.write_text(failed(15.66, 60))
    words = "ulysses2 dp4 kept_attention"  # 32,768 tokens of a rank, 128,256 logits in fp32
    tiled = answer(
        "doctor", "oom", "--factory", NAME, "--layout", f"{words} tile-loss", "--log", log
    )
    assert "which a tiled loss never forms: tiling is not in effect" in tiled.out
    assert "treated as permanently allocated" not in tiled.out.partition("what to change, each")[2]
    plain = answer("doctor", "oom", "--factory", NAME, "--layout", words, "--log", log)
    assert "that is the size of logits in fp32" in plain.out
    assert "tiling is not in effect" not in plain.out


def test_memory_that_nccl_lacks_is_not_answered_with_more_groups(answer, tmp_path):
    (tmp_path / "output.log").write_text(OF_NCCL)
    words = "tp2 ulysses4 kept_attention tile-loss"
    asked = ("doctor", "oom", "--factory", NAME, "--layout", words)
    said = answer(*asked, "--log", tmp_path / "output.log").out
    assert "NCCL_BUFFSIZE=2097152" in said
    assert "this layout has 2" in said


def test_no_choice_is_printed_where_the_log_leaves_room_for_none(answer, tmp_path):
    (tmp_path / "output.log").write_text(failed(54, 79))
    said = answer("doctor", "oom", "--factory", NAME, "--log", tmp_path / "output.log")
    assert "what fits: " in said.out
    assert "the planner's choice" not in said.out


def test_remedies_that_nobody_has_tried_on_gpus_are_marked(answer):
    said = answer("doctor", "oom", "--factory", NAME, "--layout", "tp2 dp4").out
    assert "not tried" not in said
    rare = answer("doctor", "oom", "--factory", "llama3_70b_nemo_128k", "--layout", "tp8").out
    for line in ("Adam on the host *", "* not tried in whole runs on GPUs here"):
        assert f"\n{line}" in rare
    assert "\noffload both *" not in rare
    assert "Adam on the host: not tried in whole runs on GPUs here" in rare


def test_remedies_are_printed_in_the_order_of_their_cost(answer):
    said = answer("doctor", "oom", "--factory", NAME, "--layout", "tp2 dp4 mb2").out
    rows = ("smaller micro-batch ", "tiled loss ", "tiled MLP ", "fewer heads at a time ")
    places = [said.index(f"\n{row}") for row in rows]
    assert places == sorted(places)
    assert (
        "remedies, the cheapest first: smaller micro-batch, tiled loss and MLP, recompute" in said
    )


def test_any_card_on_any_stage_is_looked_at_under_the_layout_that_ran(answer):
    said = answer("doctor", "oom", *COMBINED, "--layout", "tp2 ulysses4 dp2")
    assert said.code == 0, said.err
    assert said.out.startswith("llama31_8b_prolong_512k: llama31_8b at 512K tokens on 16 GPUs")
    words = commands(said.out)[0]
    asked = shlex.split(
        "--ladder prolong --card llama31_8b --stage 512K --executor slurm "
        f"--cluster {YOUR_CLUSTER} --nodes 2"
    )
    assert words[: 2 + len(asked)] == ["longhaul", "run", *asked]
    assert words[2 + len(asked)] == "--layout"
    assert len(words) == 4 + len(asked)


def test_without_a_layout_any_card_has_the_planners(answer):
    found = case(
        "", Machines(cluster="dgx_h200", nodes=2), card="llama31_8b", ladder="prolong", stage="512K"
    )
    assert (found.plan.gpus, found.plan.cluster.name) == (16, "dgx_h200")
    assert found.plan.fits
    said = answer("doctor", "slow", *COMBINED, "--cluster", "dgx_h200", "--nodes", "2")
    assert f"layout: {words_of(found.plan.workload.layout)}" in said.out
    assert "no layout of these GPUs that is 2% faster" in said.out


def test_where_the_planner_has_no_layout_the_command_states_one():
    found = case("", Machines(layout="tp8"), card="llama31_405b", ladder="llama31", stage="128K")
    words = shlex.split(found.command(found.plan.workload).replace("\\\n", " "))
    assert words[:4] == ["longhaul", "pretrain", "--card", "llama31_405b"]
    assert words[-2:] == ["--layout", "tp8"]
