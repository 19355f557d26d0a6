# SPDX-License-Identifier: Apache-2.0
"""What the lines around the ranks do when they fail, on a real Slurm; the ranks are shell words."""

import time

import pytest

from slurm.batch_script import setup_lines

pytestmark = pytest.mark.slow

SECONDS = 300
JOBS = {
    "fails": ("false", 2, 1),
    "left over": ("false", 2, 1),
    "told": (
        '[ $attempt -gt 0 ] && word=finished || word=continue;'
        # A lock of the attempt before would be in this folder.
        ' mkdir "$TORCH_EXTENSIONS_DIR" && echo $word at step 3 >"$out"', 1, 0,
    ),
    "one bad node": (
        'if [ $attempt -gt 0 ]; then echo finished all >"$out"; else'
        ' echo $SLURMD_NODENAME >>"$out.bad_nodes"; false; fi', 1, 1,
    ),
    "no other node": ('echo n2 >>"$out.bad_nodes"; false', 2, 1),
    "the other is excluded": ('echo n2 >>"$out.bad_nodes"; false', 1, 1),
    "refused": ('echo refused the gate is shut >"$out"; false', 1, 3),
    "nothing written": ("false", 1, 3),
}  # fmt: skip
"""The words of a job, its nodes, and how often it may fail."""


@pytest.fixture(scope="module")
def ended(slurm, tmp_path_factory):
    """Return what is asked of each job that has ended, all of which ran side by side."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "a file").touch()
    (folder / "left over.failures").write_text("7\n")
    numbers = {}
    for name, (words, nodes, most) in JOBS.items():
        outcome = folder / ("a file/outcome" if name == "nothing written" else name)
        excluded = "n[1]" if name == "the other is excluded" else ""
        lines = setup_lines(outcome, most_failures=most, python=None, excluded=excluded)
        script = (
            f'{lines}\nattempt=${{SLURM_RESTART_COUNT:-0}} out="$LONGHAUL_OUTCOME"\n'
            f'echo "attempt $attempt on $SLURM_JOB_NODELIST"\n{words}'
        )
        numbers[name] = slurm.sbatch(script, f"--nodes={nodes}", "--open-mode=append")
    for number in numbers.values():
        slurm.wait(number, timeout_seconds=SECONDS)
    return lambda name: (
        slurm.wait(numbers[name]), slurm.restarts(numbers[name]), slurm.log(numbers[name])
    )  # fmt: skip


@pytest.mark.parametrize("name", ["fails", "left over"])
def test_a_job_that_fails_is_queued_again_so_many_times(ended, name):
    state, restarts, log = ended(name)
    assert (state, restarts) == ("FAILED", 1)
    assert "longhaul: failed 2 times in a row" in log


def test_a_job_that_was_told_to_stop_goes_on_and_that_is_no_failure(ended):
    state, restarts, log = ended("told")
    assert (state, restarts) == ("COMPLETED", 1), log
    assert "continue at step 3" in log


def test_a_blamed_node_is_left_out(ended):
    state, restarts, log = ended("one bad node")
    assert (state, restarts) == ("COMPLETED", 1), log
    nodes = [line.split()[-1] for line in log.splitlines() if line.startswith("attempt ")]
    assert sorted(nodes) == ["n1", "n2"]


def test_a_blamed_node_is_tried_again_where_too_few_are_left(ended):
    state, restarts, log = ended("no other node")
    assert (state, restarts) == ("FAILED", 1)
    assert "1 nodes are left without n2; all are tried again" in log
    state, restarts, log = ended("the other is excluded")
    assert (state, restarts) == ("FAILED", 1)
    assert "0 nodes are left without n1,n2; all are tried again" in log


def test_a_refusal_ends_the_job(ended):
    state, restarts, log = ended("refused")
    assert (state, restarts) == ("FAILED", 0)
    assert "refused the gate is shut" in log


def test_a_job_that_cannot_write_is_not_queued_for_ever(ended):
    state, restarts, log = ended("nothing written")
    assert (state, restarts) == ("FAILED", 0)
    assert "nothing can be written beside" in log


def test_a_cancelled_job_stays_cancelled(slurm, tmp_path):
    lines = setup_lines(tmp_path / "outcome", most_failures=3, python=None)
    number = slurm.sbatch(f"{lines}\necho runs\nsrun sleep 600")
    end = time.monotonic() + SECONDS
    while "runs" not in slurm.log(number):
        assert time.monotonic() < end
        time.sleep(0.2)
    slurm.cancel(number)
    assert slurm.wait(number) == "CANCELLED"
    time.sleep(3)
    assert (slurm.state(number), slurm.restarts(number)) == ("CANCELLED", 0)
