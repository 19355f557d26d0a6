# SPDX-License-Identifier: Apache-2.0
"""Times of the parts of a step, from events that torch's profiler makes on a GPU; what is named."""

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from torch.autograd.profiler_util import DeviceType, FunctionEvent

from custom_modules.profiling.step_parts import named_parts, part_times


def event(name, start, end, *, thread=1, stream=None, number=0, operator=0, annotation=False):
    """Return an event of the host, or of a stream; times in microseconds.

    A kernel has the `number` of the call that launched it, and the `operator` that made the call.
    """
    return FunctionEvent(
        id=number,
        name=name,
        thread=thread,
        start_us=start,
        end_us=end,
        use_device="cuda",
        device_type=DeviceType.CPU if stream is None else DeviceType.CUDA,
        device_resource_id=stream,
        is_user_annotation=annotation,
        linked_correlation_id=operator,
    )


def operator(name, start, end, *kernels, thread=1):
    """Return an operator with kernels of these microseconds."""
    made = event(name, start, end, thread=thread, number=1)  # operators are counted apart
    for kernel in kernels:
        made.append_kernel("kernel", 0, kernel)
    return made


launch = event("cuLaunchKernelEx", 17e5, 18e5, number=13)  # by no operator of PyTorch
launch.append_kernel("gemm", 0, 8e5)  # of the operator with the same number
EVENTS = [
    event("step 5", 0, 2e6, annotation=True),
    event("part: forward", 0, 5e5, annotation=True),
    operator("aten::mm", 1e5, 2e5, 3e5),
    event("cudaLaunchKernel", 15e4, 16e4, number=11, operator=1),
    event("part: backward", 5e5, 15e5, annotation=True),
    operator("aten::mm", 6e5, 7e5, 8e5, thread=2),  # by autograd's thread
    event("cudaLaunchKernel", 65e4, 66e4, thread=2, number=12, operator=2),
    event("part: optimizer", 16e5, 2e6, annotation=True),
    launch,
    event("gemm", 2e5, 5e5, stream=7, number=11, operator=1),
    event("part: forward", 2e5, 5e5, stream=7, annotation=True),
    event("gemm", 7e5, 15e5, stream=7, number=12, operator=2),
    event("fused_adam", 18e5, 2e6, stream=7, number=13),
    event("ncclDevKernel_SendRecv", 4e5, 8e5, stream=9, number=14, operator=3),
    event("ncclDevKernel_SendRecv", 14e5, 16e5, stream=9, number=15, operator=3),
]


def test_a_backward_has_the_kernels_that_another_thread_launched():
    parts = {row["name"]: row for row in part_times(EVENTS)[0]}
    assert parts["forward"]["device_seconds"] == pytest.approx(0.3)
    assert parts["backward"]["device_seconds"] == pytest.approx(0.8)
    assert parts["backward"]["host_seconds"] == pytest.approx(1.0)
    assert [row["calls"] for row in parts.values()] == [1, 1, 1]


def test_a_part_has_the_kernels_that_no_operator_launched():
    parts = {row["name"]: row for row in part_times(EVENTS)[0]}
    assert parts["optimizer"]["device_seconds"] == pytest.approx(0.2)


def test_only_communication_that_runs_alone_is_exposed():
    # From 0.5 to 0.7 s and from 1.5 to 1.6 s no other kernel ran.
    assert part_times(EVENTS)[1] == pytest.approx(0.3)


class Optimizer:
    """An optimizer."""

    def step(self):
        """Compute something."""
        return torch.ones(4).sum()


class Reader:
    """A module that reads data."""

    def data_step(self, batches):
        """Return the next batch."""
        return next(batches)


def test_after_the_profiled_steps_methods_are_those_that_were_there():
    before = schedules.forward_step, schedules.backward_step, Optimizer.step, Reader.data_step
    with named_parts([], Optimizer(), Reader()):
        assert Optimizer.step is not before[2]
    after = schedules.forward_step, schedules.backward_step, Optimizer.step, Reader.data_step
    assert after == before
