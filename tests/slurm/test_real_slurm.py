# SPDX-License-Identifier: Apache-2.0
"""The Slurm of the tests does what chains of jobs rely on."""

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.conditions import until
from tests.slurm.support.processes import carrying
from tests.slurm.support.real_slurm import NODES, TREE, SlurmError

# A step whose task says what it caught, on each node.
CATCHING = """
srun --output={log} --open-mode=append bash -c '
    trap "echo $SLURMD_NODENAME caught {signal} at \\$SECONDS; exit 85" {signal}
    echo $SLURMD_NODENAME began
    for _ in $(seq {seconds}0); do sleep 0.1; done'
"""


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_a_step_of_two_tasks_runs_on_both_nodes(slurm):
    job = slurm.sbatch("srun bash -c 'echo $SLURM_PROCID on $SLURMD_NODENAME'", "--nodes=2")
    assert slurm.wait(job) == "COMPLETED"
    assert sorted(slurm.log(job).split("\n")) == ["", "0 on n1", "1 on n2"]
    assert slurm.job(job)["NodeList"] == "n[1-2]"


def test_jobs_run_in_the_order_of_their_dependencies(slurm, tmp_path):
    log = tmp_path / "order"
    first = slurm.sbatch(f"sleep 1; echo first >>{log}")
    second = slurm.sbatch(f"echo second >>{log}", f"--dependency=afterok:{first}")
    third = slurm.sbatch(f"echo third >>{log}", f"--dependency=afterok:{second}")
    assert slurm.wait(third) == "COMPLETED"
    assert lines(log) == ["first", "second", "third"]


def test_a_failed_job_cancels_those_that_depend_on_it(slurm, tmp_path):
    log = tmp_path / "ran"
    first = slurm.sbatch("sleep 1; exit 3")
    held = slurm.sbatch(f"echo held >>{log}", f"--dependency=afterok:{first}")
    second = slurm.sbatch(
        f"echo second >>{log}", f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes"
    )
    third = slurm.sbatch(
        f"echo third >>{log}", f"--dependency=afterok:{second}", "--kill-on-invalid-dep=yes"
    )
    assert slurm.wait(first) == "FAILED"
    assert slurm.job(first)["ExitCode"] == "3:0"
    assert slurm.wait(second) == "CANCELLED"
    assert slurm.wait(third) == "CANCELLED"
    # Without the option it waits for ever.
    assert slurm.state(held) == "PENDING"
    assert slurm.job(held)["Reason"] == "DependencyNeverSatisfied"
    slurm.cancel(held)
    assert slurm.wait(held) == "CANCELLED"
    assert lines(log) == []


def test_a_step_that_ends_with_85_on_a_signal_has_its_job_requeued(slurm, tmp_path):
    log = tmp_path / "steps"
    step = CATCHING.format(log=log, signal="TERM", seconds=600)
    job = slurm.sbatch(
        f"""
        again() {{
            code=$?
            [ $code -ne 85 ] || scontrol requeue $SLURM_JOB_ID
            exit $code
        }}
        trap again EXIT
        if [ -n "$SLURM_RESTART_COUNT" ]; then
            echo "restart $SLURM_RESTART_COUNT"
            exit 0
        fi
        {step}""",
        "--nodes=2",
        "--open-mode=append",
    )
    after = slurm.sbatch("true", f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes")
    until(lambda: len(lines(log)) == 2)
    slurm.signal(job, "TERM")
    until(lambda: slurm.restarts(job) == 1)
    assert slurm.wait(job) == "COMPLETED"
    caught = [re.sub(" at .*", "", line) for line in lines(log) if "caught" in line]
    assert sorted(caught) == ["n1 caught TERM", "n2 caught TERM"]
    assert "restart 1" in slurm.log(job)
    assert slurm.restarts(job) == 1
    assert slurm.wait(after) == "COMPLETED"


@pytest.mark.slow
def test_a_job_on_a_node_that_dies_is_requeued_and_ends_on_the_other(slurm, tmp_path):
    log = tmp_path / "ran"
    job = slurm.sbatch(
        f"""
        echo $SLURMD_NODENAME ${{SLURM_RESTART_COUNT:-0}} >>{log}
        [ -n "$SLURM_RESTART_COUNT" ] || srun sleep 600"""
    )
    after = slurm.sbatch("true", f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes")
    until(lambda: lines(log))
    dead = slurm.job(job)["BatchHost"]
    (other,) = set(NODES) - {dead}
    slurm.kill_node(dead)
    try:
        assert not carrying(
            f"SLURM_CONF={slurm.environment['SLURM_CONF']}", f"SLURMD_NODENAME={dead}"
        )
        until(lambda: slurm.node_state(dead).startswith("DOWN"))
        until(lambda: slurm.restarts(job) == 1)
        assert slurm.wait(job) == "COMPLETED"
        assert lines(log) == [f"{dead} 0", f"{other} 1"]
        assert slurm.wait(after) == "COMPLETED"
    finally:
        slurm.start_node(dead)
    assert slurm.node_state(dead) == "IDLE"


@pytest.mark.slow
def test_a_job_of_both_nodes_waits_for_the_one_that_died(slurm, tmp_path):
    log = tmp_path / "ran"
    job = slurm.sbatch(
        f"""
        srun bash -c '
            echo $SLURMD_NODENAME ${{SLURM_RESTART_COUNT:-0}} >>{log}
            [ -n "$SLURM_RESTART_COUNT" ] || sleep 600'""",
        "--nodes=2",
    )
    until(lambda: len(lines(log)) == 2)
    slurm.kill_node("n2")
    try:
        until(lambda: slurm.node_state("n2").startswith("DOWN"))
        until(lambda: slurm.restarts(job) == 1)
        until(lambda: slurm.state(job) == "PENDING")
    finally:
        slurm.start_node("n2")
    assert slurm.wait(job) == "COMPLETED"
    assert sorted(lines(log)) == ["n1 0", "n1 1", "n2 0", "n2 1"]

    def runs():
        return slurm.run("sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", str(job)).split()

    until(lambda: runs() == ["NODE_FAIL", "COMPLETED"])


@pytest.mark.slow
def test_a_signal_before_the_time_limit_reaches_the_steps(slurm, tmp_path):
    log = tmp_path / "steps"
    step = CATCHING.format(log=log, signal="USR1", seconds=120)
    job = slurm.sbatch(f"#!/bin/bash\n#SBATCH --signal=USR1@10 --time=1 --nodes=2\n{step}")
    assert slurm.wait(job) == "FAILED"
    assert slurm.job(job)["ExitCode"] == "85:0"
    caught = [line for line in lines(log) if "caught USR1" in line]
    assert sorted(line.split()[0] for line in caught) == ["n1", "n2"]
    # Slurm looks at its jobs each 30 seconds, so the signal comes early, never after the limit.
    assert all(0 < int(line.split()[-1]) < 60 for line in caught)


def test_accounting_has_the_steps_and_states_of_a_job(slurm):
    job = slurm.sbatch("srun true; srun false")
    assert slurm.wait(job) == "FAILED"

    def states():
        said = slurm.run("sacct", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", str(job))
        return {line.split("|")[0]: line.split("|", 1)[1] for line in said.splitlines()}

    until(lambda: f"{job}.1" in states() and "RUNNING" not in str(states()))
    assert states() == {
        f"{job}": "FAILED|1:0",
        f"{job}.batch": "FAILED|1:0",
        f"{job}.0": "COMPLETED|0:0",
        f"{job}.1": "FAILED|1:0",
    }


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--account=nobody",), "account"),
        (("--partition=nowhere",), "partition"),
    ],
)
def test_what_the_cluster_lacks_is_refused_at_submission(slurm, args, word):
    with pytest.raises(SlurmError, match=word):
        slurm.sbatch("true", *args)


@pytest.mark.parametrize(
    ("args", "fits"),
    [
        (("--nodes=128", "--gpus-per-node=8", "--ntasks-per-node=8", "--exclusive"), True),
        (("--nodes=129",), False),
        (("--nodes=4", "--gpus-per-node=9"), False),
    ],
)
def test_a_script_for_a_large_cluster_is_judged_without_one(slurm, args, fits):
    said = pytest.raises(SlurmError, match="not available") if not fits else nullcontext()
    with said:
        slurm.run("sbatch", "--test-only", "--partition=gpus", *args, input="#!/bin/bash\ntrue\n")


def test_a_wait_that_is_too_long_shows_the_log_of_the_job(slurm):
    job = slurm.sbatch("echo here I am; sleep 600")
    until(lambda: slurm.log(job))
    with pytest.raises(SlurmError, match=r"(?s)JobName=.*here I am"):
        slurm.wait(job, timeout_seconds=0)
    slurm.cancel(job)
    assert slurm.wait(job) == "CANCELLED"


def test_a_caller_that_is_killed_leaves_no_process_and_no_folder():
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from tests.slurm.support.real_slurm import RealSlurm\n"
            "slurm = RealSlurm()\n"
            "slurm._start_daemon('sleeper', 'sleep', '600')\n"
            "print(slurm.environment['SLURM_CONF'], flush=True)\n"
            "input()",
        ],
        cwd=TREE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    conf = caller.stdout.readline().strip()
    until(lambda: len(carrying(f"SLURM_CONF={conf}")) == 1)
    caller.kill()
    caller.communicate()
    until(lambda: not carrying(f"SLURM_CONF={conf}"))
    until(lambda: not Path(conf).parent.exists())
