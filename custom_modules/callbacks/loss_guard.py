# SPDX-License-Identifier: Apache-2.0
"""Rewinds a run after a loss spike, and resumes it without the batches that caused the spike.

A NaN or infinite loss or gradient, or a loss far above its recent median, rarely recovers by itself
(PaLM, arXiv 2204.02311, section 5.1: restart from a checkpoint before the spike and skip the
batches around it). The guard ends the run before that step is saved and records the window in
`rewinds.jsonl`. Run again, the stage resumes from its last checkpoint and skips the samples from
there to the spike. If `most` rewinds do not help, the batches are not the cause, and the run fails.

A stage begins with a jump: the longer context is new to the model (a loss of 5.5 on the first step
is normal for an extension), so spikes in the warm-up are ignored. Sample numbers stay those of the
plan: a window shifts the data that is read, not the numbers of steps.
"""

import json
import math
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

MOST_LATE = 32
"""Steps that the median covers."""
LEAST_LATE = 8
"""Steps needed for a meaningful median."""


class LossBrokeError(RuntimeError):
    """Report the step of a loss spike and what follows; `again` is whether to run again."""

    def __init__(self, said: str, *, again: bool) -> None:
        """Take the message and whether another attempt may resume."""
        super().__init__(said)
        self.again = again


class LossGuard(Callback):
    """End a run at a loss that is not finite or `rise` nats above its median.

    Megatron's own check of gradients (`check_for_nan_in_grad`) names the rank, but ends the run
    before this guard can record the samples to skip: recipes leave it off.
    """

    def __init__(self, path: str, warmup_steps: int, rise: float = 2.0, most: int = 3) -> None:
        """Take the file of rewinds, the steps to ignore, the nats, and the most rewinds."""
        if rise <= 0:
            raise ValueError(f"rise is {rise:g} nats; expected more than 0")
        if most < 0:
            raise ValueError(f"most is {most}; it must be at least 0")
        self.path, self.warmup_steps, self.rise, self.most = Path(path), warmup_steps, rise, most
        self._late: deque[float] = deque(maxlen=MOST_LATE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the windows of samples to skip to the training data."""
        windows = tuple((one["samples"][0], one["samples"][1]) for one in read(self.path))
        trainer.datamodule.pass_over(windows)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Check the loss that the step log has just written; all ranks see the same."""
        loss = trainer.callback_metrics["reduced_train_loss"].item()
        norm = trainer.callback_metrics.get("grad_norm")
        step = trainer.global_step
        why = self._broken(loss, 0.0 if norm is None else float(norm), step)
        if why is None:
            self._late.append(loss)
            return
        again = len(read(self.path)) < self.most
        if again and trainer.is_global_zero:
            self._note(trainer, step, loss, why)
        said = f"step {step}: {why}"
        if not again:
            raise LossBrokeError(
                f"{said}; {self.most} rewinds have not helped: see `longhaul doctor spike`",
                again=False,
            )
        raise LossBrokeError(
            f"{said}; run again, the stage resumes from its last checkpoint without the batches "
            "from there to this step",
            again=True,
        )

    def _broken(self, loss: float, norm: float, step: int) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the norm of the gradient is {norm}"
        if step <= self.warmup_steps or len(self._late) < LEAST_LATE:
            return None
        usual = median(self._late)
        if loss > usual + self.rise:
            return f"the loss is {loss:.3f}, {loss - usual:.2f} nats above its median"
        return None

    def _note(self, trainer: Trainer, step: int, loss: float, why: str) -> None:
        """Append the window from the checkpoint of the next attempt to this step."""
        saved = trainer.checkpoint_callback.newest_step()
        sequences = trainer.datamodule.global_batch_size
        line = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "why": why,
            "from_step": saved,
            "samples": [saved * sequences, (step - saved) * sequences],
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rewinds so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
