# SPDX-License-Identifier: Apache-2.0
"""A chain is not submitted while jobs of an earlier one, in the same run folder, still run."""

import json

import pytest

from longhaul.jobs import ladder_run, submission_checks
from recipes.ladders import LADDERS
from recipes.models import CARDS
from slurm.cluster_file import ClusterFile, Slurm

SITE = ClusterFile(name="site", slurm=Slurm(account="me"), container=None)


@pytest.fixture
def submitted(tmp_path):
    """Return a plan into whose folder two jobs were submitted."""
    launch = tmp_path / "run" / "launch"
    launch.mkdir(parents=True)
    (launch / "jobs.json").write_text(json.dumps({"tiny_512": "11", "evaluate_tiny_512": "12"}))
    return ladder_run.plan(LADDERS["tiny"], CARDS["tiny"], tmp_path / "run", tmp_path / "store")


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Return a function that says what `squeue` answers here; `srun` is there too."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def answers(said: str, code: int = 0) -> None:
        for name in ("squeue", "srun"):
            path = programs / name
            path.write_text(f'#!/bin/sh\necho "$@" >{programs}/asked\n{said}\nexit {code}\n')
            path.chmod(0o755)

    return answers


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD"])
def test_a_run_folder_with_a_live_job_is_refused(submitted, squeue, tmp_path, state):
    squeue(f"echo CLUSTER: dgx; echo 11 COMPLETED; echo 12 {state}; echo 99 RUNNING")
    with pytest.raises(ValueError, match="are still in the queue") as refused:
        submission_checks.require_idle(submitted, SITE)
    assert f"12 evaluate_tiny_512 ({state.lower()})" in str(refused.value)
    assert str(refused.value).endswith("scancel 12")
    assert "--jobs=11,12" in (tmp_path / "programs" / "asked").read_text()


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("", 0),
        ("echo 11 CANCELLED; echo 12 FAILED", 0),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2", 1),
    ],
)
def test_a_run_folder_whose_jobs_are_over_is_taken(submitted, squeue, said, code):
    squeue(said, code)
    submission_checks.require_idle(submitted, SITE)


def test_a_scheduler_that_does_not_say_is_not_taken_for_idle(submitted, squeue):
    squeue("echo 'Unable to contact slurm controller' >&2", 1)
    with pytest.raises(ValueError, match=r"does not say .* Unable to contact slurm controller"):
        submission_checks.require_idle(submitted, SITE)


def test_a_run_folder_without_jobs_asks_nobody(submitted):
    (submitted.run / "launch" / "jobs.json").unlink()
    submission_checks.require_idle(submitted, SITE)


@pytest.mark.parametrize(
    ("content", "said"),
    [('{"tiny', "is not JSON"), ('["11"]', "does not list jobs"), ('{"a": null}', "does not list")],
)
def test_a_broken_record_of_jobs_is_named(submitted, content, said):
    path = submitted.run / "launch" / "jobs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} {said}"):
        submission_checks.require_idle(submitted, SITE)
