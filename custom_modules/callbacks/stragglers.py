# SPDX-License-Identifier: Apache-2.0
"""Name the GPUs that compute slower than the fastest rank, or than they themselves did.

One slow GPU slows every rank: all wait for it in the next collective, so that nobody's step time
tells whose fault it is. NVIDIA's resiliency extension times the kernels of each rank by CUPTI,
communication left out, and compares them; a score of 0.7 is a GPU at 70% of its reference. Nothing
is stopped: whether a node is worth a restart is for whoever reads the log and the metrics
`gpu_relative_perf/min` and `gpu_individual_perf/min`.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class Stragglers(Callback):
    """Compare kernel times between ranks every so often; idle where CUPTI is not there."""

    def __init__(self, seconds: int = 300, relative: float = 0.7, individual: float = 0.7) -> None:
        """Take the time between reports, and the scores below which a GPU is named."""
        if seconds < 1:
            raise ValueError(f"seconds is {seconds}; reports are at least 1 second apart")
        for name, value in (("relative", relative), ("individual", individual)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value:g}; a score is between 0 and 1")
        self.seconds, self.relative, self.individual = seconds, relative, individual
        self.detector: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Time the kernels of each training step from here on, where every rank can."""
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
            rank_zero_info(f"slow GPUs are not looked for: {said or 'a rank has no CUPTI'}")

    def on_train_batch_end(self, *step: Any) -> None:
        """Report where it is time."""
        if self.detector is not None:
            self.detector.on_train_batch_end(*step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop timing."""
        if self.detector is not None:
            self.detector.teardown(trainer, pl_module, stage)
            self.detector = None

    def _made(self) -> Any:
        """Return NVIDIA's callback; what it needs is loaded in its `setup`."""
        from nvidia_resiliency_ext.ptl_resiliency import StragglerDetectionCallback

        return StragglerDetectionCallback(
            report_time_interval=self.seconds,
            calc_relative_gpu_perf=True,
            calc_individual_gpu_perf=True,
            num_gpu_perf_scores_to_print=0,
            gpu_relative_perf_threshold=self.relative,
            gpu_individual_perf_threshold=self.individual,
            stop_if_detected=False,
            enable_ptl_logging=True,
        )
