# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor hang` on what PyTorch's flight recorder gave on real ranks."""

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.flight_recorder.components.config_manager import JobConfig

from slurm import flight_recorder
from slurm.flight_recorder import record_collectives
from tests.longhaul.doctor.test_spike_checks import a_run

RANK = """
import os, sys
from pathlib import Path
from slurm import flight_recorder
from slurm.flight_recorder import record_collectives
record_collectives(Path(sys.argv[1]))
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
entries = torch._C._distributed_c10d._dump_fr_trace_json()
assert b'"entries"' in entries and b"all_reduce" in entries, entries
# NCCL's watchdog writes these bytes to this name when a collective has waited too long.
written = torch._C._distributed_c10d._dump_fr_trace()
Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0").write_bytes(written)
"""


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    """Return what a rank wrote to the name that the recorder gave it."""
    stage = tmp_path_factory.mktemp("stage")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANK, stage, stage / "store"],
        env={key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
        | {"TORCHELASTIC_RUN_ID": "5123.0"},
        check=True,
    )  # fmt: skip
    return stage / "flight_recorder" / "5123.0" / "rank_0"


@pytest.fixture
def hung(dump) -> Callable[..., Path]:
    """Return a function that gives a run the dumps of some ranks of an attempt."""

    def write(run: Path, ranks: list[int], attempt: str = "5123.0") -> Path:
        stage = run / "stages" / "long"
        recipe = json.loads((stage / "config.yaml").read_text())
        recipe["trainer"] |= {"num_nodes": 2, "devices": 2}  # how many ranks the stage has
        (stage / "config.yaml").write_text(json.dumps(recipe))
        folder = stage / "flight_recorder" / attempt
        folder.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            shutil.copy(dump, folder / f"rank_{rank}")
        return run

    return write


def test_ranks_that_wrote_nothing_are_named(answer, hung, tmp_path):
    run = hung(a_run(tmp_path / "my run"), [0, 1, 3])
    found = answer("doctor", "hang", "--run", run)
    assert found.code == 0, found.err
    folder = run / "stages" / "long" / "flight_recorder" / "5123.0"
    assert "long: at 20" in found.out
    assert "a collective reached its timeout or failed" in found.out
    assert "3 ranks of 4 wrote their last collectives" in found.out
    assert f"to {folder}\n" in found.out
    assert "1 rank wrote none (2): " in found.out
    command = f"torchfrtrace --prefix rank_ --allow-incomplete-ranks '{folder}'"
    assert command in found.err
    told = JobConfig().parse_args(shlex.split(command)[1:])
    assert (told.trace_dir, told.prefix) == (str(folder), "rank_")


def test_the_newest_attempt_is_shown_also_in_numbers(answer, hung, tmp_path):
    run = hung(a_run(tmp_path / "run"), [0], "5123.0")
    for file in (run / "stages" / "long" / "flight_recorder" / "5123.0").iterdir():
        os.utime(file, (1, 1))
    hung(run, [0, 1, 2, 3], "5123.1")
    found = json.loads(answer("doctor", "hang", "--run", run, "--json").out)
    assert Path(found["folder"]).name == "5123.1"
    assert (found["ranks"], found["silent_ranks"]) == ([0, 1, 2, 3], [])
    shown = answer("doctor", "hang", "--run", run)
    assert "Every rank wrote, also one that hangs" in shown.out
    assert "--allow-incomplete-ranks" not in shown.err


def test_a_recipe_that_states_no_ranks_gives_none_that_are_silent(answer, hung, tmp_path):
    run = hung(a_run(tmp_path / "run"), [0])
    config = run / "stages" / "long" / "config.yaml"
    recipe = json.loads(config.read_text())
    del recipe["trainer"]["devices"]
    config.write_text(json.dumps(recipe))
    found = json.loads(answer("doctor", "hang", "--run", run, "--json").out)
    assert (found["world_size"], found["silent_ranks"]) == (None, None)
    assert "1 rank wrote their last collectives" in answer("doctor", "hang", "--run", run).out


def test_what_an_earlier_attempt_of_the_same_name_left_for_a_rank_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "TORCHELASTIC_RUN_ID": "none", "RANK": "1"})
    folder = tmp_path / "flight_recorder" / "none"
    folder.mkdir(parents=True)
    for rank in range(3):
        (folder / f"rank_{rank}").write_bytes(b"old")
    record_collectives(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == ["rank_0", "rank_2"]


def test_the_rank_that_has_not_called_what_the_others_wait_in_is_named(answer, hung, tmp_path):
    run = hung(a_run(tmp_path / "run"), [0, 1, 2, 3])
    folder = run / "stages" / "long" / "flight_recorder" / "5123.0"
    late = pickle.loads((folder / "rank_2").read_bytes())  # noqa: S301  (written by this test)
    late["entries"].pop()
    (folder / "rank_2").write_bytes(pickle.dumps(late))
    said = answer("doctor", "hang", "--run", run).out
    assert "rank 2 has not called collective 3 (all_reduce 4 Float" in said
    assert "in which the others wait; the last it called is 2" in said
    (folder / "rank_1").write_bytes(pickle.dumps(Path))  # a name, which a dump does not need
    (folder / "rank_3").write_bytes(b"cut")
    said = answer("doctor", "hang", "--run", run).out
    assert "rank_1 cannot be read: it asks for pathlib" in said
    assert "rank_3 cannot be read" in said
    assert "rank 2 has not called" in said


HUNG = """
import faulthandler, sys, time
def waits_for_the_others():
    time.sleep(60)
def reads_a_file():
    time.sleep(60)
faulthandler.dump_traceback_later(0.2, exit=True, file=open(sys.argv[1], "w"))
reads_a_file() if sys.argv[2] == "reads" else waits_for_the_others()
"""


def test_the_rank_that_hangs_in_another_place_is_named_by_the_stacks(answer, tmp_path):
    run = a_run(tmp_path / "run")
    folder = run / "stages" / "long" / "stacks"
    folder.mkdir()
    for rank, where in enumerate(("waits", "reads", "waits")):
        file = folder / f"rank_{rank}.txt"
        subprocess.run([sys.executable, "-c", HUNG, file, where], check=False)
    (folder / "rank_0_pyspy.txt").write_text(
        'Process 7: python\nPython v3.11\n\nThread 7 (idle): "MainThread"\n'
        "    clock_nanosleep (libc.so.6)\n    waits_for_the_others (<string>:4)\n"
        "    <module> (<string>:8)\n"
        'Thread 8 (idle): "MainThread"\n    other (x.py:1)\n'
    )
    (folder / "rank_4.txt").touch()  # a rank that was killed
    said = answer("doctor", "hang", "--run", run).out
    assert "long: the guard ended 3 ranks that hung" in said
    assert "rank 1:\n  reads_a_file (<string>:6)" in said
    assert "ranks 0, 2:\n  waits_for_the_others (<string>:4)" in said
    assert "The ranks named first are in another place" in said
    found = json.loads(answer("doctor", "hang", "--run", run, "--json").out)
    assert [one["ranks"] for one in found["stacks"]] == [[1], [0, 2]]


def test_a_run_that_never_hung_has_no_dump(answer, tmp_path):
    run = a_run(tmp_path / "run")
    assert "has no dump in its folder flight_recorder" in answer("doctor", "hang", "--run", run).out
    assert answer("doctor", "hang", "--run", run, "--json").out.strip() == "null"
    said = answer("doctor", "hang", "--run", run, "--stage", "lnog").error()
    assert "has no stage 'lnog'" in said


@pytest.mark.parametrize(
    ("torch", "set_too"),
    [
        ("2.13.0", {}),
        ("2.10.0a0+b1", {}),
        ("2.9.0a0+50eac811a6.nv25.09", {"TORCH_FR_BUFFER_SIZE": "7"}),
    ],
)
def test_what_the_user_sets_stays_under_every_name_that_torch_reads(
    monkeypatch, tmp_path, torch, set_too
):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
    # A copy: the variables that the function sets end with this test.
    monkeypatch.setattr(os, "environ", {**kept, "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"})
    monkeypatch.setattr(flight_recorder, "version", lambda _: torch)
    record_collectives(tmp_path)
    sizes = {key: value for key, value in os.environ.items() if key.endswith("BUFFER_SIZE")}
    assert sizes == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"} | set_too
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
