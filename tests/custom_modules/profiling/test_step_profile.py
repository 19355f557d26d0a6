# SPDX-License-Identifier: Apache-2.0
"""A profile of a small model without NeMo: what is restored, and files that cannot be written."""

import time
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from custom_modules.profiling import step_profile
from custom_modules.profiling.step_profile import StepProfile, Wanted

CPU = torch.device("cpu")


class Optimizer:
    """An optimizer without parameters."""

    optimizer = SimpleNamespace(param_groups=[], state={})

    def step(self):
        """Compute something."""
        return torch.ones(4).sum()


class Reader:
    """A module that reads data."""

    def data_step(self, batches):
        """Return the next batch."""
        return next(batches)


def profiled(folder, **how):
    """Profile step 1 and step 2, and return the profile before it is stopped."""
    profile = StepProfile(Wanted(folder=folder, first=1, last=2, rank=0, **how), CPU)
    optimizer, reader = Optimizer(), Reader()
    profile.start([], optimizer, reader)
    for step in (1, 2):
        profile.begin(step)
        reader.data_step(iter([1]))
        optimizer.step()
        profile.end()
    return profile


def test_after_a_profile_methods_are_those_that_were_there(tmp_path):
    before = schedules.forward_step, schedules.backward_step, Optimizer.step, Reader.data_step
    profile = profiled(tmp_path)
    assert Optimizer.step is not before[2]
    profile.stop()
    after = schedules.forward_step, schedules.backward_step, Optimizer.step, Reader.data_step
    assert after == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank_0_steps_1_to_2.memory.json", "rank_0_steps_1_to_2.pt.trace.json.gz", "summary.json",
    ]  # fmt: skip
    profile.stop()  # once more changes nothing


def test_a_profile_that_cannot_be_written_is_one_sentence_and_no_error(tmp_path, capfd):
    (tmp_path / "profile").write_text("a file where the folder would be")
    profiled(tmp_path / "profile").stop()
    said = capfd.readouterr().err
    assert "the profile of rank 0 was not written: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """Return a profile on a GPU, whose allocator writes an empty snapshot."""
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: open(path, "wb").close())
    wanted = Wanted(folder=tmp_path, first=1, last=2, rank=3)
    return StepProfile(wanted, torch.device("cuda", 3))


def test_a_device_that_does_not_finish_holds_up_no_error(on_gpu, tmp_path, monkeypatch, capfd):
    released, asked = Event(), []

    def synchronize(device=None):
        asked.append(device)
        released.wait(20)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(step_profile, "PATIENCE_SECONDS", 0.1)
    on_gpu.start([], Optimizer(), Reader())
    running = on_gpu.profiler
    began = time.monotonic()
    on_gpu.stop()
    waited = time.monotonic() - began
    released.set()
    running.stop()
    assert waited < 10
    assert asked[0] == torch.device("cuda", 3)  # of a thread that has not chosen it
    assert "of rank 3 was not written: its device has not finished" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rank_3_steps_1_to_2.memory.pickle"]


def test_a_snapshot_that_fails_is_not_raised_in_place_of_the_out_of_memory_error(
    on_gpu, tmp_path, monkeypatch, capfd
):
    observers = []
    attach = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, attach, observers.append, raising=False)

    def no_room(path):
        raise MemoryError("on the host")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", no_room)
    on_gpu.watch_for_out_of_memory()
    (observer,) = observers
    observer(3, 2**30, 2**36, 2**20)  # device, bytes asked for, allocated, free
    said = capfd.readouterr().err
    assert "the snapshot was not written: MemoryError: on the host" in said
    assert list(tmp_path.iterdir()) == []
