# SPDX-License-Identifier: Apache-2.0
"""What is said of a trace, from events that torch's profiler makes on a GPU."""

import pytest
from torch.autograd.profiler_util import DeviceType, FunctionEvent

from custom_modules.profiling.trace_summary import summarize, table


def event(name, start, end, *, thread=1, stream=None, kernel=0.0, annotation=False):
    """Return an event of the host, or of a stream; times in microseconds."""
    made = FunctionEvent(
        id=0,
        name=name,
        thread=thread,
        start_us=start,
        end_us=end,
        use_device="cuda",
        device_type=DeviceType.CPU if stream is None else DeviceType.CUDA,
        device_resource_id=stream,
        is_user_annotation=annotation,
    )
    if kernel:
        made.append_kernel("kernel", 0, kernel)
    return made


EVENTS = [
    event("step 5", 0, 2e6, annotation=True),
    event("part: forward", 0, 5e5, annotation=True),
    event("aten::mm", 1e5, 2e5, kernel=3e5),
    event("part: backward", 5e5, 15e5, annotation=True),
    event("aten::mm", 6e5, 7e5, thread=2, kernel=8e5),  # by autograd's thread
    event("flash_bwd", 8e5, 9e5, thread=2, kernel=2e5),
    event("gemm", 2e5, 5e5, stream=7),
    event("part: forward", 2e5, 5e5, stream=7, annotation=True),
    event("gemm", 7e5, 15e5, stream=7),
    event("ncclDevKernel_SendRecv", 4e5, 8e5, stream=9),
    event("ncclDevKernel_SendRecv", 14e5, 16e5, stream=9),
]


def test_a_backward_has_the_kernels_that_another_thread_launched():
    parts = {row["name"]: row for row in summarize(EVENTS)["parts"]}
    assert parts["forward"]["device_seconds"] == pytest.approx(0.3)
    assert parts["backward"]["device_seconds"] == pytest.approx(1.0)
    assert parts["backward"]["share"] == pytest.approx(0.5)
    assert parts["backward"]["host_seconds"] == pytest.approx(1.0)
    assert [row["calls"] for row in parts.values()] == [1, 1]


def test_only_communication_that_runs_alone_is_exposed():
    # From 0.5 to 0.7 s and from 1.5 to 1.6 s no other kernel ran.
    assert summarize(EVENTS)["exposed_communication_seconds"] == pytest.approx(0.3)


def test_operators_are_listed_by_the_time_of_their_kernels():
    summary = summarize(EVENTS)
    rows = [(row["name"], row["calls"], round(row["seconds"], 3)) for row in summary["operators"]]
    assert rows == [("aten::mm", 2, 1.1), ("flash_bwd", 1, 0.2)]
    lines = table({**summary, "rank": 0})
    assert lines[0] == "profile of 1 steps on rank 0, 2.00 s"
    assert "15.0%  exposed communication" in lines[1]
