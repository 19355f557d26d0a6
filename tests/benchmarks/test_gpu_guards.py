# SPDX-License-Identifier: Apache-2.0
"""Disturbed cases are marked, overdue ones are ended, and a GPU in use is refused."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from benchmarks.gpu import guards, measure
from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.guards import Canary, Guard, Sensors, Watch, canary, refusal
from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import ON_CPU
from benchmarks.harness.out_of_memory import out_of_memory

CPU = torch.device("cpu")
FIRST = Canary(700.0, 3000.0)
SAID = (
    "CUDA out of memory. Tried to allocate 8.40 GiB. GPU 0 has a total capacity of 79.18 GiB of "
    "which 4.12 GiB is free. Process 7 has 75.06 GiB memory in use. Of the allocated memory"
)


class Nvml:
    """Lists some processes, as the driver does."""

    NVML_CLOCK_SM = 1
    NVMLError = LookupError

    def __init__(self, *processes):
        self.processes = set(processes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [type("Process", (), {"pid": each}) for each in self.processes]

    def nvmlDeviceGetClockInfo(self, handle, which):  # noqa: N802
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return 650_000


@pytest.fixture
def nvml(monkeypatch):
    """Return NVML's place, and have the sensors of a GPU ask it."""
    found = Nvml()
    monkeypatch.setattr(guards, "_first_gpu", lambda: (found, None))
    return found


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Return a function that measures the first case, by a function, under a guard."""

    def run(answer, *, canaries=(FIRST,), sensors=None, until=60.0, cases=1):
        given = all_cases(ON_CPU)[:cases]
        results = Results(tmp_path / "results")
        left = list(canaries)
        guard = Guard(
            CPU, FIRST, measure=lambda device: left.pop(0) if len(left) > 1 else left[0],
            sensors=sensors, pause=0.0,
        )  # fmt: skip
        for case in given:
            monkeypatch.setitem(measure.MEASUREMENTS, case.kind, answer)
        session = measure.Session(
            sizes=ON_CPU, results=results, guard=guard, rental="a", until=time.time() + until,
            peak=1.0,
        )  # fmt: skip
        measure.measure(given, session)
        found = results.read()
        return [found.get(case.name) for case in given]

    return run


def test_a_canary_measures_both_rates_and_shares_the_lower_one():
    found = canary(CPU)
    assert found.tflops > 0
    assert found.gbps > 0
    assert FIRST.share(Canary(1000.0, 4000.0)) == 0.7


def test_a_slow_canary_marks_the_case_unless_it_recovers(measured):
    slow = Canary(200.0, 3000.0)
    (found,) = measured(lambda sizes: {"a": 1}, canaries=[slow, slow])
    assert found.disturbed == "the canary before it has 0.29 of the first one's rate"
    assert found.figures == {"a": 1}
    assert not found.counts
    (found,) = measured(lambda sizes: {"a": 1}, canaries=[slow, FIRST])
    assert found.counts
    assert found.gpu == {"tflops": 700.0, "gbps": 3000.0}


def test_a_second_process_on_the_gpu_marks_the_case_and_one_of_our_own_does_not(measured, nvml):
    nvml.processes.add(os.getpid())
    sensors = Sensors(torch.device("cuda"))
    assert sensors.strangers() == set()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]

    def with_child(sizes):
        with subprocess.Popen(sleep) as child:
            nvml.processes.add(child.pid)
            assert sensors.strangers() == set()
            child.kill()
        return {}

    (found,) = measured(with_child, sensors=sensors)
    assert found.counts
    assert found.gpu["least_mhz"] == 1980
    assert found.gpu["most_watts"] == 650
    stranger = psutil.Process().ppid()

    def with_stranger(sizes):
        nvml.processes.add(stranger)
        time.sleep(1.5 * guards.INTERVAL)
        nvml.processes.discard(stranger)  # seen by the thread, gone at the end
        return {}

    (found,) = measured(with_stranger, sensors=sensors)
    assert found.disturbed == f"other processes used the GPU: {stranger}"


def test_a_gpu_that_does_not_tell_is_measured_without_sensors(nvml, monkeypatch):
    def refuse(*_):
        raise LookupError("Not Supported")

    for name in dir(nvml):
        if name.startswith("nvmlDeviceGet"):
            monkeypatch.setattr(nvml, name, refuse)
    sensors = Sensors(torch.device("cuda"))
    assert sensors.strangers() == set()
    assert sensors.clock_and_power() is None


def test_in_a_container_that_hides_our_number_a_newcomer_is_still_seen(nvml):
    nvml.processes = {70_001}  # this process, as the host numbers it
    with subprocess.Popen(["sleep", "60"]) as earlier:
        sensors = Sensors(torch.device("cuda"))
        assert sensors.strangers() == set()
        nvml.processes.add(70_002)
        assert sensors.strangers() == {70_002}
        with subprocess.Popen(["sleep", "60"]) as child:
            assert sensors.strangers() == set()  # it may be the child
            child.kill()
        earlier.kill()


def test_a_gpu_in_use_is_refused_in_a_sentence(nvml, monkeypatch):
    device = torch.device("cuda")
    nvml.processes = {7}
    said = refusal(device, Sensors(device))
    assert said.startswith("1 other process(es) compute on this GPU (7); end them first")
    nvml.processes = set()
    for free, said in ((70, "10.0 of 80 GiB of this GPU are in use; free them first"), (79, "")):
        memory = (free * 2**30, 80 * 2**30)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, memory=memory: memory)
        assert refusal(device, Sensors(device)) == said
    assert refusal(CPU, Sensors(CPU)) == ""


def test_a_watch_sees_what_comes_and_goes_between_its_ends():
    seen = iter([set(), {5}])
    with Watch(lambda: next(seen, set()), interval=0.01) as watch:
        time.sleep(0.1)
    assert watch.seen == {5}
    assert watch.figures() == {}


def test_a_case_past_its_deadline_is_ended_with_what_it_started(measured, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.cases.ON_CPU_LIMIT", 0.5)
    started = []

    def endless(sizes):
        started.append(subprocess.Popen(["sleep", "60"]))
        time.sleep(60)

    (found,) = measured(endless)
    assert found.reason == "took longer than 0 s and was ended"
    assert found.seconds < 10
    assert started[0].wait(timeout=10) == -9


def test_a_case_too_long_for_the_time_left_is_left_out(measured):
    assert measured(lambda sizes: {}, until=1.0) == [None]


def test_what_a_case_noted_is_kept_where_it_fails(measured):
    def fails(sizes, *, note):
        note({"parts": 1})
        raise ValueError("no more\nof it")

    (found,) = measured(fails)
    assert (found.figures, found.reason) == ({"parts": 1}, "ValueError: no more")


def test_a_case_that_runs_out_of_memory_is_the_last_of_its_process(measured):
    """Itself, or one of the blocks that it compares."""

    def runs_out(sizes):
        raise torch.OutOfMemoryError(SAID)

    first, second = measured(runs_out, cases=2)
    assert first.reason.startswith("out of memory: Tried to allocate 8.40 GiB. GPU 0 has")
    assert second is None
    assert out_of_memory(torch.OutOfMemoryError("")) == "out of memory"


def test_one_block_out_of_memory_ends_the_process_too(measured):
    why = out_of_memory(torch.OutOfMemoryError(SAID))
    assert why.endswith("75.06 GiB memory in use")
    answer = {"blocks": {"PyTorch": {"reason": why}}}
    first, second = measured(lambda sizes: answer, cases=2)
    assert first.figures == answer
    assert second is None
