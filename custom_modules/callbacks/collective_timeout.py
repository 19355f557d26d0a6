# SPDX-License-Identifier: Apache-2.0
"""How long a collective may wait for a rank before the job is ended.

Megatron-Core gives its groups 30 minutes and PyTorch its own 10: a step of an hour outlasts both,
and the first of a long stage does sooner, which looks like broken hardware. A limit of days would
never find a rank that hangs, so the limit follows from the planned step
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
        """Set it, on all ranks alike: each waits here for the others."""
        if dist.get_backend() != "nccl":
            return
        timeout = timedelta(seconds=self.seconds)
        parallel_state.update_pg_timeout(timeout)
        parallel_state.update_pg_timeout(timeout, dist.group.WORLD)
