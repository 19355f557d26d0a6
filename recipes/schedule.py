# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a stage, in shares of its peak and its steps.

NeMo's cosine takes warm-up steps and a final rate in absolute numbers, so an override of the peak
or of the steps leaves them behind. Here both follow.
"""

from typing import Any

from nemo.lightning.pytorch.optim.lr_scheduler import CosineAnnealingScheduler

from recipes.stages import Cosine


class WarmupCosine(CosineAnnealingScheduler):
    """Linear warm-up to the optimizer's rate, then a cosine down to `final_ratio` of it."""

    def __init__(self, max_steps: int, warmup_ratio: float, final_ratio: float) -> None:
        """Take the steps (the trainer's replace them when it starts) and the two shares.

        Raises ValueError for shares outside 0 to 1.
        """
        self.shape = Cosine(peak=0.5, warmup_ratio=warmup_ratio, final_ratio=final_ratio)
        super().__init__(max_steps=max_steps, constant_steps=0)

    def scheduler(self, model: Any, optimizer: Any) -> Any:
        """Return NeMo's cosine with the steps and rates that the shares come to."""
        self.warmup_steps = self.shape.warmup_steps(self.max_steps)
        self.min_lr = optimizer.param_groups[0]["lr"] * self.shape.final_ratio
        return super().scheduler(model, optimizer)
