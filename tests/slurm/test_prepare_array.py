# SPDX-License-Identifier: Apache-2.0
"""An array of jobs shares the parts of a store on a real Slurm; one that is killed runs again."""

import json
import sys

import pytest

from data.prepare import merge_plan, prepare, write_plan
from slurm.batch_script import setup_lines
from tests.conditions import until
from tests.data.conftest import made_up_texts
from tests.data.preparation.conftest import SHARD_BYTES, contents
from tests.slurm.support.real_slurm import TREE

JOBS = 2
PROGRAM = """
import os, signal, sys
from pathlib import Path
from data.prepare import run_tasks
from data.preparation import task as tasks
from slurm.outcome import write_outcome
folder, jobs, number = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["SLURM_ARRAY_TASK_ID"])
if number == 1 and not os.environ.get("SLURM_RESTART_COUNT"):
    run = tasks.run_task
    def run_and_die(work, task):
        run(work, task)
        os.kill(os.getpid(), signal.SIGKILL)
    tasks.run_task = run_and_die
run_tasks(folder, number, jobs)
write_outcome("finished", "")
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr("data.preparation.plan.SHARD_BYTES", SHARD_BYTES)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in made_up_texts(120)))
    return str(path)


def test_a_killed_job_of_the_array_is_requeued_alone_and_the_store_is_the_same(
    slurm, source, tmp_path
):
    reference = prepare(source, tmp_path / "reference", vocab_size=300)
    work = write_plan(source, tmp_path / "store", vocab_size=300)
    assert work.count > 2 * JOBS
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    lines = setup_lines(
        tmp_path / "outcomes" / "parts", most_failures=3, python=sys.prefix, array=True
    )
    number = slurm.sbatch(
        f"{lines}\nexport PYTHONPATH={TREE}\nsrun python {program} {work.folder} {JOBS}\n",
        f"--array=0-{JOBS - 1}",
        "--open-mode=append",
    )
    after = slurm.sbatch("true", f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes")
    try:
        assert slurm.wait(after) == "COMPLETED"
    finally:
        slurm.cancel(number)
    assert merge_plan(work.folder).root == tmp_path / "store"
    assert contents(tmp_path / "store") == contents(reference.root)

    def runs():
        said = slurm.run("sacct", "-D", "-X", "-n", "-P", "-o", "JobID,State", "-j", str(number))
        return [line.split("|") for line in said.splitlines()]

    until(lambda: [state for _, state in runs()].count("COMPLETED") == JOBS)
    numbers = [of for of, _ in runs()]
    assert (numbers.count(f"{number}_0"), numbers.count(f"{number}_1")) == (1, 2)
