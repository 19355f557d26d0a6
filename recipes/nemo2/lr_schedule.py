# SPDX-License-Identifier: Apache-2.0
"""Learning rate schedules of a stage, in shares of its peak and its steps.

NeMo's cosine takes absolute warm-up steps and an absolute final rate, which do not follow an
override of the peak or the steps. These do.
"""

from typing import Any

from nemo.lightning.pytorch.optim.lr_scheduler import CosineAnnealingScheduler
from torch.optim.lr_scheduler import LambdaLR

from recipes.spec.stage import Cosine, Linear


class WarmupCosine(CosineAnnealingScheduler):
    """Linear warm-up to the optimizer's rate, then a cosine down to `final_ratio` of it."""

    def __init__(self, max_steps: int, warmup_ratio: float, final_ratio: float) -> None:
        """Set the steps (replaced by those of the trainer when it starts) and the two shares.

        Raises ValueError for shares outside 0 to 1.
        """
        self.shape = Cosine(peak=0.5, warmup_ratio=warmup_ratio, final_ratio=final_ratio)
        super().__init__(max_steps=max_steps, constant_steps=0)

    def scheduler(self, model: Any, optimizer: Any) -> Any:
        """Return NeMo's cosine with the absolute steps and rates."""
        self.warmup_steps = self.shape.warmup_steps(self.max_steps)
        self.min_lr = optimizer.param_groups[0]["lr"] * self.shape.final_ratio
        return super().scheduler(model, optimizer)


class WarmupLinear(WarmupCosine):
    """Linear warm-up to the optimizer's rate, then a line down to `final_ratio` of it."""

    def scheduler(self, model: Any, optimizer: Any) -> Any:
        """Return the configuration for Lightning: the optimizer and a schedule by step."""
        self.warmup_steps = self.shape.warmup_steps(self.max_steps)
        line = LambdaLR(optimizer, self.share)
        by_step = {"scheduler": line, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": by_step, "monitor": self.monitor}

    def share(self, step: int) -> float:
        """Return the rate at a step as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        left = (self.max_steps - step) / max(1, self.max_steps - self.warmup_steps)
        return self.shape.final_ratio + (1 - self.shape.final_ratio) * max(0.0, left)


SCHEDULES = {Cosine: WarmupCosine, Linear: WarmupLinear}
"""Scheduler class of each schedule of a stage."""
