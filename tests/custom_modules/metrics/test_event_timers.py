# SPDX-License-Identifier: Apache-2.0
import copy
import inspect
import re
import time

import pytest
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.pipeline_parallel import combined_1f1b, p2p_communication, schedules

from custom_modules.metrics.event_timers import DATA_TIMER, PARTS, EventTimers, timed


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_every_timer_of_the_installed_megatron_core_has_a_part():
    sources = (
        schedules, p2p_communication, combined_1f1b, optimizer, distrib_optimizer,
        finalize_model_grads,
    )  # fmt: skip
    names = {
        name
        for module in sources
        for name in re.findall(
            r"timers\('([\w-]+)'", inspect.getsource(inspect.getmodule(module) or module)
        )
    }
    assert len(names) > 15
    assert names - set(PARTS) == {"forward-backward"}


def test_time_inside_another_timer_is_taken_off_the_outer_one():
    timers = EventTimers()
    timers.open()
    began = time.perf_counter()
    timers("forward-compute", log_level=2).start()
    with timed(timers, DATA_TIMER):
        spin(0.02)
    spin(0.01)
    timers("forward-compute").stop()
    with timed(timers, "optimizer-inner-step"), timed(timers, "optimizer-inner-step"):
        spin(0.01)
    whole = time.perf_counter() - began
    seconds = timers.seconds()
    assert seconds["data"] >= 0.02
    assert 0.01 <= seconds["forward"] <= whole - 0.03
    assert 0.01 <= seconds["optimizer"] <= whole - 0.03
    assert sum(seconds.values()) <= whole


def test_nothing_is_recorded_between_steps_and_an_unfinished_timer_is_forgotten():
    timers = EventTimers()
    with timed(timers, "forward-compute"):
        assert timers.spans == []
    timers.open()
    timers("backward-compute").start()
    timers.open()
    with timed(timers, "forward-backward"):
        pass
    assert timers.running == []
    assert set(timers.seconds().values()) == {0.0}
    assert not timers.is_open


def test_a_copied_config_is_timed_by_the_same_timers():
    timers = EventTimers()
    assert copy.deepcopy({"timers": timers})["timers"] is timers


def test_events_of_a_device_are_recorded_without_waiting_and_used_again(monkeypatch):
    import torch

    made, clock = [], iter(range(100))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, end: "Event") -> float:
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waited for the device"))
    timers = EventTimers()
    for _ in range(3):
        timers.open()
        with timed(timers, "forward-compute"), timed(timers, DATA_TIMER):
            pass
        seconds = timers.seconds()
        assert (seconds["forward"], seconds["data"]) == (2.0, 1.0)
    assert len(made) == 4
