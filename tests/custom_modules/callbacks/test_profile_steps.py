# SPDX-License-Identifier: Apache-2.0
"""A profile on a GPU whose device is the CPU's: snapshots, and files that cannot be written."""

from types import SimpleNamespace

import pytest
import torch

from custom_modules.callbacks.profile_steps import ProfileSteps


@pytest.fixture
def observers(monkeypatch) -> list:
    """Return what is called when CUDA's memory runs out; its allocator writes empty snapshots."""
    found: list = []
    attach = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, attach, found.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: open(path, "wb").close())
    return found


def on_rank(profile: ProfileSteps, rank: int) -> None:
    device = SimpleNamespace(root_device=torch.device("cuda", rank))
    profile.setup(SimpleNamespace(global_rank=rank, strategy=device), None, "fit")


def test_the_first_out_of_memory_error_of_a_chosen_rank_leaves_a_snapshot(observers, tmp_path):
    for rank in (0, 3):
        on_rank(ProfileSteps(str(tmp_path), 1, 2, ranks=[3]), rank)
    (observer,) = observers
    for _ in range(2):
        observer(3, 2**30, 2**36, 2**20)  # device, bytes asked for, allocated, free
    assert [path.name for path in tmp_path.iterdir()] == ["rank_3_out_of_memory.pickle"]


def test_a_snapshot_that_fails_is_not_raised_in_place_of_the_out_of_memory_error(
    observers, tmp_path, monkeypatch, capfd
):
    def no_room(path):
        raise MemoryError("on the host")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", no_room)
    on_rank(ProfileSteps(str(tmp_path), 1, 2, ranks=None), 3)
    observers[0](3, 2**30, 2**36, 2**20)
    assert "was not written: MemoryError: on the host" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_written_is_a_sentence_a_file_and_no_error(tmp_path, capfd):
    (tmp_path / "profile").write_text("a file where the folder would be")
    profile = ProfileSteps(str(tmp_path / "profile"), 1, 1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=profile._write_trace
    ):
        torch.ones(8, 8) @ torch.ones(8, 8)
    said = capfd.readouterr().err
    for kind in ("parts.json", "table.txt", "pt.trace.json.gz"):
        assert f"rank_0_steps_1_to_1.{kind} was not written: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]
