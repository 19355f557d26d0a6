# SPDX-License-Identifier: Apache-2.0
"""Names the GPUs that compute slower than the fastest rank, or slower than before.

One slow GPU slows every rank: all wait for it in the next collective, so step times do not identify
it. NVIDIA's resiliency extension times the kernels of each rank by CUPTI, without communication,
and compares them; a score of 0.7 is a GPU at 70% of its reference. The run is not stopped: the log
and the metrics `gpu_relative_perf/min` and `gpu_individual_perf/min` help a user to decide whether
to restart without a node. The lines of steps have the GPUs of the newest report as `slow_gpus`,
with the lower of their two scores. `rank_times` compares ranks without CUPTI, also on CPUs.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class Stragglers(Callback):
    """Compare kernel times between ranks at intervals; do nothing without CUPTI."""

    def __init__(self, seconds: int = 300, relative: float = 0.7, individual: float = 0.7) -> None:
        """Take the time between reports, and the scores below which a GPU is named."""
        if seconds < 1:
            raise ValueError(f"seconds is {seconds}; reports are at least 1 second apart")
        for name, value in (("relative", relative), ("individual", individual)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value:g}; a score is between 0 and 1")
        self.seconds, self.relative, self.individual = seconds, relative, individual
        self.detector: Any = None
        self.slow: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Time the kernels of each training step from now on, if every rank can."""
        said = ""
        try:
            self.detector = self._made()
            self.detector.setup(trainer, pl_module, stage)
        except (ImportError, RuntimeError) as error:
            said = str(error)
        able = torch.tensor(int(not said), device=torch.cuda.current_device())
        dist.all_reduce(able, op=dist.ReduceOp.MIN)
        if not able:
            self.teardown(trainer, pl_module, stage)
            rank_zero_info(f"slow GPUs are not detected: {said or 'a rank has no CUPTI'}")

    def on_train_batch_end(self, *step: Any) -> None:
        """Report if the interval has passed."""
        if self.detector is not None:
            self.detector.on_train_batch_end(*step)

    def measured_at_step(self, *_: Any) -> dict[str, Any]:
        """Return the slow GPUs of the newest report, which rank 0 has; nothing without CUPTI."""
        return {} if self.detector is None else {"slow_gpus": self.slow}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop timing."""
        if self.detector is not None:
            self.detector.teardown(trainer, pl_module, stage)
            self.detector = None

    def _made(self) -> Any:
        """Return NVIDIA's callback; its `setup` imports its dependencies."""
        from nvidia_resiliency_ext.ptl_resiliency import StragglerDetectionCallback

        guard = self

        class Reporting(StragglerDetectionCallback):
            """NVIDIA's callback, which keeps what it reports."""

            def _handle_straggler_report(self, pl_module: Any, report: Any) -> bool:
                guard.slow = slow_gpus(report, guard.relative, guard.individual)
                return bool(super()._handle_straggler_report(pl_module, report))

        return Reporting(
            report_time_interval=self.seconds,
            calc_relative_gpu_perf=True,
            calc_individual_gpu_perf=True,
            num_gpu_perf_scores_to_print=0,
            gpu_relative_perf_threshold=self.relative,
            gpu_individual_perf_threshold=self.individual,
            stop_if_detected=False,
            enable_ptl_logging=True,
        )


def slow_gpus(report: Any, relative: float, individual: float) -> list[dict[str, Any]]:
    """Return rank, node and score of each GPU of a report below a threshold, slowest first."""
    scores: dict[int, float] = {}
    for bound, of_ranks in (
        (relative, report.gpu_relative_perf_scores),
        (individual, report.gpu_individual_perf_scores),
    ):
        for rank, score in of_ranks.items():
            if score < bound:
                scores[rank] = min(score, scores.get(rank, 1.0))
    return [
        {"rank": rank, "node": report.rank_to_node[rank], "score": score}
        for rank, score in sorted(scores.items(), key=lambda one: one[1])
    ]
