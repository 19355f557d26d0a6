# SPDX-License-Identifier: Apache-2.0
"""Timeout of collectives, after which the job is ended.

Megatron-Core's groups have a timeout of 30 minutes and PyTorch's of 10. A step of an hour exceeds
both, and the first step of a long stage may do so earlier, which looks like broken hardware. A
timeout of days would never detect a hanging rank, so it is derived from the planned step
(`recipes.planner.timeouts`).
"""

from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from megatron.core import parallel_state


class CollectiveTimeout(Callback):
    """Set the timeout of all process groups before the model is built; NCCL's alone."""

    def __init__(self, seconds: int) -> None:
        """Take the seconds."""
        if seconds < 1:
            raise ValueError(f"collectives wait {seconds} seconds; they wait at least 1")
        self.seconds = seconds

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the timeout on all ranks, each of which waits here for the others."""
        if dist.get_backend() != "nccl":
            return
        timeout = timedelta(seconds=self.seconds)
        parallel_state.update_pg_timeout(timeout)
        parallel_state.update_pg_timeout(timeout, dist.group.WORLD)
