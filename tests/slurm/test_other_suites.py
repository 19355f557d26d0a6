# SPDX-License-Identifier: Apache-2.0
"""The job that runs other suites' code: what Slurm reads of it, and what its programs are given."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "slurm" / "other_suites.sbatch"
RECORD = """#!/bin/bash
printf '%q ' "$(basename "$0")" "$@" >>"$RECORD"
echo >>"$RECORD"
"""
PYTHON = """for word in "$@"; do case $word in
    --generations-dir=*)
        mkdir "${word#*=}/_a_model"
        touch "${word#*=}"/_a_model/preds_{gov_report,summ_screen_fd,qmsum,squality,qasper}.json
        touch "${word#*=}"/_a_model/preds_{narrative_qa,quality,musique,space_digest}.json
        touch "${word#*=}"/_a_model/preds_book_sum_sort.json ;;
    mrcr.py) printf '%s\\n' 0 0.5 1 ;;
esac; done
"""


def test_slurm_would_take_it(slurm):
    slurm.run("sbatch", "--test-only", "--partition=gpus", JOB)  # raises with its words


@pytest.fixture
def programs(tmp_path) -> Path:
    """Return a folder of suites, each with an environment whose programs record their words."""
    for suite in ("HELMET", "mrcr", "zero_scrolls"):
        scripts = tmp_path / "the suites" / suite / "env" / "bin"
        scripts.mkdir(parents=True)
        (scripts / "activate").write_text(f"PATH={shlex.quote(str(scripts))}:$PATH\n")
        bodies = {"python": PYTHON, "vllm": "exec sleep 60\n", "curl": ""}
        for name, body in bodies.items():
            (scripts / name).write_text(RECORD + body)
            (scripts / name).chmod(0o755)
    return tmp_path / "the suites"


def calls(programs: Path, suite: str, *words: str) -> tuple[list[list[str]], Path]:
    """Run the job for a suite; return the words of each program that it started, and its output."""
    model, out, record = (programs.parent / name for name in ("a model", "the out", "record"))
    model.mkdir()
    subprocess.run(
        ["bash", JOB, suite, programs, model, out, *words],
        env=os.environ | {"RECORD": str(record), "SLURM_JOB_ID": "70007"},
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return [shlex.split(line) for line in record.read_text().splitlines()], out


def test_helmet_evaluates_each_category_of_the_export(programs):
    found, out = calls(programs, "HELMET", "--use_chat_template", "False")
    model = str(programs.parent / "a model")
    assert [call[3] for call in found] == [
        f"configs/{task}.yaml"
        for task in ("recall", "rag", "rerank", "cite", "longqa", "summ", "icl")
    ]
    for call in found:
        given = dict(zip(call[2::2], call[3::2], strict=True))
        assert call[:2] == ["python", "eval.py"]
        assert given.pop("--config")
        assert given == {
            "--model_name_or_path": model, "--output_dir": str(out), "--use_chat_template": "False",
        }  # fmt: skip


def test_mrcr_asks_a_server_of_the_export_and_averages_the_grades(programs):
    found, out = calls(programs, "mrcr")
    given = {call[0]: call[1:] for call in found}
    assert given.keys() == {"vllm", "curl", "python"}
    assert given["vllm"][:2] == ["serve", str(programs.parent / "a model")]
    assert given["vllm"][-1] == "20007"
    assert given["curl"][-1] == "http://localhost:20007/health"
    assert (out / "mrcr.score").read_text() == "0.5\n"


def test_mrcr_scores_nothing_that_another_server_answered(programs):
    server = programs / "mrcr/env/bin/vllm"
    server.write_text(RECORD + "exit 1\n")
    (programs / "mrcr/env/bin/curl").write_text("#!/bin/bash\nsleep 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        calls(programs, "mrcr")
    assert not (programs.parent / "the out/mrcr.score").exists()


def test_zero_scrolls_refuses_a_folder_with_predictions(programs):
    (programs.parent / "the out/another").mkdir(parents=True)
    (programs.parent / "the out/another/preds_qmsum.json").touch()
    with pytest.raises(subprocess.CalledProcessError, match="status 2"):
        calls(programs, "zero_scrolls")


def test_zero_scrolls_writes_a_submission_of_all_its_answers(programs):
    (run, prepare), out = calls(programs, "zero_scrolls")
    assert run[-1] == f"--generations-dir={out}"
    given = dict(zip(prepare[2::2], prepare[3::2], strict=True))
    assert given.pop("--output_dir") == str(out)
    assert len(given) == 10
    for option, path in given.items():
        task = option.removeprefix("--").removesuffix("_file")
        assert Path(path) == out / "_a_model" / f"preds_{task}.json"
