# SPDX-License-Identifier: Apache-2.0
"""A profile of a small model without NeMo: what is restored, and files that cannot be written."""

from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel import schedules

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
