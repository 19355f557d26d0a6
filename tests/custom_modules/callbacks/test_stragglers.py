# SPDX-License-Identifier: Apache-2.0
"""Slow ranks by name: NVIDIA's detector over two ranks, with kernel times in CUPTI's place."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist
from nvidia_resiliency_ext.straggler import Detector

from custom_modules.callbacks import stragglers
from custom_modules.callbacks.stragglers import Stragglers
from custom_modules.cpu.backend import cpu_backend
from tests.ranks import Ranks

STEPS = 40


class Kernels:
    """The extension that reads kernel times: every call of a kernel took so many microseconds."""

    def __init__(self, microseconds: float) -> None:
        self.microseconds = microseconds

    def __call__(self, **_) -> "Kernels":
        return self

    def get_stats(self) -> dict:
        took = self.microseconds
        times = {"min": took, "max": took, "median": took, "avg": took, "stddev": 0.0}
        return {"gemm": SimpleNamespace(**times, num_calls=8)}

    def initialize(self) -> None: ...
    def shutdown(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def reset(self) -> None: ...


class Strategy:
    """What the detector wraps."""

    def training_step(self) -> None: ...


def _steps(slow: int | None, have: tuple[int, ...]) -> tuple[list[str], bool, dict[str, float]]:
    """Take steps; return what was logged, whether it was looked, and the metrics."""
    rank = dist.get_rank()
    sys.modules.pop("nvrx_cupti_module", None)
    if rank in have:
        sys.modules["nvrx_cupti_module"] = module = ModuleType("nvrx_cupti_module")
        module.CuptiProfiler = Kernels(200.0 if rank == slow else 100.0)
    said: list[str] = []
    metrics: dict[str, float] = {}
    model = SimpleNamespace(log_dict=lambda values, **_: metrics.update(values))
    trainer = SimpleNamespace(strategy=Strategy(), global_rank=rank)
    guard = Stragglers(seconds=1)
    stragglers.rank_zero_info = said.append
    guard.setup(trainer, model, "fit")
    looked = guard.detector is not None
    if looked:
        guard.detector.logger = SimpleNamespace(warning=said.append, info=lambda _: None)
        Detector.report_interval_tracker.iter_interval = 10  # as if steps took a tenth of a second
    for _ in range(STEPS):
        trainer.strategy.training_step()
        guard.on_train_batch_end(trainer, model, None, None, 0)
    guard.teardown(trainer, model, "fit")
    return said, looked, metrics


CASES = {
    "second slow": (1, (0, 1)),
    "one speed": (None, (0, 1)),
    "nobody can": (1, ()),
    "the first can": (1, (0,)),
    "the second can": (1, (1,)),
}


def _every_case() -> dict[str, tuple[list[str], bool, dict[str, float]]]:
    with cpu_backend(force=True):
        return {name: _steps(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found():
    with Ranks(_every_case, 2) as ranks:
        return ranks.results(timeout_seconds=400)


def test_the_rank_whose_kernels_take_twice_as_long_is_named(found):
    said, looked, metrics = found[0]["second slow"]
    assert looked
    assert len(said) == STEPS // 10
    assert all("rank=1" in one and "rank=0" not in one for one in said)
    assert metrics["gpu_relative_perf/min"] == pytest.approx(0.5)


def test_ranks_of_one_speed_are_left_alone(found):
    said, looked, metrics = found[0]["one speed"]
    assert (said, looked) == ([], True)
    assert metrics["gpu_relative_perf/min"] == pytest.approx(1.0)


@pytest.mark.parametrize("who", ["nobody can", "the first can", "the second can"])
def test_no_rank_looks_where_one_cannot(found, who):
    for said, looked, metrics in (one[who] for one in found):
        assert (looked, metrics) == (False, {})
        assert said[0].startswith("slow GPUs are not detected: ")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seconds": 0}, "seconds is 0"),
        ({"relative": 1.0}, "relative is 1"),
        ({"individual": 0}, "individual is 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Stragglers(**wrong)
